"""The collective half of `ecemb.protect`: from arenas that are found to memory that is open.

`opening` tells the stages from top to bottom. `request` is what the user asks for, `training` what the model
holds; `negotiate` agrees on layout and plan with all ranks, from the `history` that surviving arenas share;
`create` makes new arenas and fills them; `leftovers` removes those of earlier starts, and `remaining` says
what this one leaves; `connections` makes the process groups; `spread` chooses code and placement. Another
number of ranks goes on from the arenas that `former` describes, whose rows stand where `places` says, and
`moving` fills new arenas from them. `survey` describes a training for `python -m ecemb check`.
"""
