"""Warm starts: `ecemb-run`, which has a worker forked from a process that has imported torch already.

`stub` is what a launcher starts: it imports the standard library alone, asks the fork server of this job on
this host for a worker, passes signals on to it, and ends as it ends. `server` imports what the job needs
once, and forks; `worker` is what the forked process makes of itself before it runs the script. `identity`
decides which server may stand in for a plain start of the interpreter; `wire` is how they talk.

Nothing here knows of arenas, steps or recovery: a script that doesn't use ecemb starts warm just as well.
"""
