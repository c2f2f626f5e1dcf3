"""Who the workers are and how they communicate.

`rendezvous` makes the process group: workers announce themselves (`announcement`, `rollcall`), get ranks
(`assignment`), connect (`handshake`, `links`) and watch each other (`failure_detector`, `heartbeat`).
`collectives` have names and deadlines; those of a step use the ranks' own connections (`channels`).
`whereabouts`, `worker_exit` and `error_file` say where a worker was when it ended; `enforced_end` sees to it
that a failed one ends.
"""
