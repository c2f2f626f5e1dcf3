"""The collective half of `ecemb.protect`: from arenas that are found to memory that is open.

`opening` tells the stages from top to bottom, and makes the process groups. `request` is what the user asks
for and what the model holds; `placement_choice` chooses code and placement; `agree` compares layout and plan
with all ranks, from the `history` that surviving arenas share; `create` makes new arenas and fills them, and
removes those of earlier starts. Another number of ranks goes on from the arenas that `history` describes, and
`moving` fills new arenas from them. `survey` describes a training for `python -m ecemb check`.
"""
