"""The collective half of `ecemb.protect`: from the arenas that a start finds to opened memory.

`opening` runs the stages from top to bottom, and makes the process groups. `request` has the user's arguments
and the state of the model; `placement_choice` chooses code and placement; `agree` compares layout and plan
among all ranks, with the `history` that surviving arenas share; `create` creates and fills new arenas, and
removes those of earlier starts. With another number of ranks, `moving` fills new arenas from the old ones
that `history` describes. `survey` describes a training for `ecemb check`.
"""
