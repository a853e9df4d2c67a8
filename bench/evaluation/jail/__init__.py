"""One untrusted program, run and ended: what happens on the far side of ``evaluation.sandbox``.

supervise  a process of its own: isolates, starts the program, waits, kills all that is left, reports
contain    namespaces, user id, resource limits: what the kernel is asked for
inside     in the program's process: guard against processes and sockets, run, prove that every assert ran
processes  finds and ends processes by parent, by a marker in their environment, by user id

Standard library only, since it runs in an isolated interpreter. Linux only.
"""
