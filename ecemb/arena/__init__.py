"""Memory that outlives the process: files of this user, mapped, claimed by a lock; their content is opaque.

`arena` is one rank's file, `header` its words, `classify` decides which headers of a job count, `scan` finds
and removes arenas on a host, and asks a job to leave. `private_files` and `capacity` are the operating
system's part: ownership, claims and room.
"""
