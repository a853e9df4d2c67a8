"""What is asked and how an answer is judged; knows nothing of servers.

problem      Problem, Task, Grade, Style: what every task is made of
sources      rows from a local file, an installed package, or the Hub, in this order
thoughts     the answer behind a model's thinking
numbers      the number that an answer gives, and whether two are equal
gsm8k        GSM8K: few-shot chain of thought for base models, boxed answers for Thinking ones
code_text    the program in an answer
humaneval    HumanEval and HumanEval+
speed        chat, code edit, copy and long context, from bench/prompts
catalogue    tasks by name
"""
