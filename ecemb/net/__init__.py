"""Membership and communication of the workers.

`rendezvous` makes the process group: workers announce themselves (`roster`), get ranks (`assignment`),
connect (`links`) and watch each other (`watch`). `collectives` have names and deadlines; those of a step use
the ranks' own connections (`mesh`). `worker_exit` and `error_file` report the error and the place of a failed
worker, and enforce its end. `processes` has kernel services for a process, `wording` the texts for ranks,
counts and sizes in log lines.
"""
