"""Who the workers are and how they communicate.

`rendezvous` makes the process group: workers announce themselves (`rollcall`), get ranks (`assignment`),
connect (`links`) and watch each other (`failure_detector`). `collectives` have names and deadlines; those of
a step use the ranks' own connections (`channels`). `worker_exit` and `error_file` say where a worker was when
it ended, and see to it that a failed one ends.
"""
