"""Starting an SGLang server, talking to it, and timing what it answers.

server   one ``sglang.launch_server`` as a process group of its own: start, health, log, pool, stop
log      the sentence in a server log that says why it did not start
client   SGLang's HTTP API as typed calls: generate, stream, concurrent runs, cache flush
timing   tokens per second of one or several completions, from token counts
counters speculation counters of a completion: rounds, accept length, ticks per token
probe    the size of a logit, through SGLang's custom logit processors

Shared by the command line, ``bench/`` and the tests. Imports neither sglang nor torch, so that a
command answers at once; the server runs in its own processes.
"""
