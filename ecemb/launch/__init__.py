"""Warm starts: `ecemb-run` forks a worker from a process that has already imported torch.

`stub` is the launcher's command: it imports only the standard library, asks the fork server of this job on
this host for a worker, passes signals on to the worker, and ends like it. `server` imports the job's modules
once, and forks; `worker` sets the forked process up before it runs the script. `wire` has their messages, and
decides which server may replace a plain start of the interpreter.

Nothing here knows of arenas, steps or recovery: a script without ecemb starts warm just as well.
"""
