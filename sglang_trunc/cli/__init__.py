"""The ``sglang-trunc`` command.

app        the commands and their options
demo       plain and speculative servers on a bundled model, one after the other
verify     the agreement gate: starts the servers, prints every difference
agreement  what the gate does once the servers run: runs, differences, judgement
doctor     what is installed, which seams hold, what would run
prompts    the bundled prompts and prompt files
facts      what a checkpoint's files say: stop tokens, bundled demo models
launch     a server with a spinner while it starts
report     tables and JSON
"""
