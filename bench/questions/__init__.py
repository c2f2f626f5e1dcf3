"""Questions of `python -m bench`, a folder for each: `question.py` answers it."""
