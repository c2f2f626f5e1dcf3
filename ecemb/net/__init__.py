"""Who the workers are and how they communicate.

`rendezvous` makes the process group: workers announce themselves (`roster`), get ranks (`assignment`),
connect (`links`) and watch each other (`watch`). `collectives` have names and deadlines; those of a step use
the ranks' own connections (`mesh`). `worker_exit` and `error_file` say where a worker was when it ended, and
see to it that a failed one ends. `processes` has what a process asks of the kernel, `wording` how log lines
name ranks, counts and sizes.
"""
