"""The same question to SGLang's API and to an OpenAI-compatible one: the same answer, and times that add up."""

import time

import pytest
from evaluation import target
from evaluation.endpoint import OpenAIEndpoint, Question, SGLangEndpoint, spread
from evaluation.settings import GREEDY, SAMPLED, peer
from evaluation.tasks.problem import Message, Style
from fake_sglang import FakeSGLang, Settings

from sglang_trunc.serving.client import RequestRefused
from sglang_trunc.serving.server import ServerError
from tests.bench.eval_openai_server import OpenAI

pytestmark = pytest.mark.slow  # starts many processes


def question(**changes):
    defaults = {"prompt": "Q: 6 * 7?", "messages": (), "style": Style.BASE, "max_new_tokens": 8, "stop": ("Q:",),
                "sampling": GREEDY, "seed": 7}  # fmt: skip
    return Question(**(defaults | changes))


@pytest.mark.parametrize("speculative", [False, True])
def test_sglangs_own_api(speculative):
    fake = Settings(speculative=speculative, delay=0.01)
    before = time.time()
    with FakeSGLang(fake) as server, SGLangEndpoint(server.url) as endpoint:
        answer = endpoint.ask(question())
    assert answer.completion_tokens == len(answer.output_ids) == 8
    assert answer.prompt_tokens == 9
    assert [tokens for _, tokens in answer.events] == ([1, 4, 7, 8] if speculative else list(range(1, 9)))
    assert answer.first == answer.events[0][0]
    assert 0 < answer.first < answer.end < 10
    assert before - 0.1 < answer.begin < time.time()
    assert answer.counted
    assert answer.speculation == ((7, 3) if speculative else None)
    sent = fake.requests[0]["sampling_params"]
    assert sent["stop"] == ["Q:"]
    assert "sampling_seed" not in sent


def test_a_sampled_question_carries_its_seed_to_both():
    fake = Settings()
    with FakeSGLang(fake) as server, SGLangEndpoint(server.url) as endpoint:
        endpoint.ask(question(sampling=SAMPLED))
    sent = fake.requests[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["sampling_seed"]) == (1.0, 0.7, 7)
    with OpenAI() as other, OpenAIEndpoint(other.url) as endpoint:
        endpoint.ask(question(sampling=SAMPLED))
    body = other.requests[0][1]
    assert (body["temperature"], body["top_p"], body["seed"]) == (1.0, 0.7, 7)


def test_an_openai_server_with_running_counts():
    with OpenAI() as server, OpenAIEndpoint(server.url) as endpoint:
        answer = endpoint.ask(question())
    path, body = server.requests[0]
    assert path == "/v1/completions"
    assert body["model"] == "some-model"
    assert body["prompt"] == "Q: 6 * 7?"
    assert body["stop"] == ["Q:"]
    assert answer.text == " It is 42."
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish) == (5, 8, "stop")
    assert [tokens for _, tokens in answer.events] == [2, 4, 6, 8]
    assert answer.counted
    assert answer.output_ids is None
    assert answer.speculation is None


def test_an_openai_server_without_running_counts_has_its_total_right():
    with OpenAI(running_counts=False) as server, OpenAIEndpoint(server.url) as endpoint:
        answer = endpoint.ask(question())
    assert answer.completion_tokens == 8
    assert not answer.counted
    assert [tokens for _, tokens in answer.events] == [1, 3, 5, 8]


def test_messages_go_to_the_chat_api():
    with OpenAI() as server, OpenAIEndpoint(server.url) as endpoint:
        messages = (Message("user", "6 * 7?"),)
        answer = endpoint.ask(question(prompt=None, messages=messages, style=Style.THINKING))
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "6 * 7?"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert answer.text == " It is 42."


def test_refusals():
    with OpenAI(status=400) as server, OpenAIEndpoint(server.url) as endpoint:
        endpoint._model = "m"
        with pytest.raises(RequestRefused, match="too long"):
            endpoint.ask(question())
    quiet = OpenAI(usage=False, running_counts=False)
    with quiet, OpenAIEndpoint(quiet.url) as endpoint, pytest.raises(RequestRefused, match="include_usage"):
        endpoint.ask(question())


@pytest.mark.parametrize(
    ("arrivals", "total", "tokens"),
    [([(1.0, None)], 5, [1]), ([(1.0, None), (2.0, None)], 5, [1, 5]), ([(1.0, 3), (2.0, 5)], 5, [3, 5]),
     ([(1.0, None)], 0, [0])],
)  # fmt: skip
def test_spread(arrivals, total, tokens):
    assert [count for _, count in spread(arrivals, total)[0]] == tokens


def test_a_url_is_asked_what_it_is():
    with FakeSGLang(Settings()) as server:
        with target.started(peer(f"p={server.url}"), None, (), {}) as found:
            assert found.sglang is not None
            assert found.info["device"] == "cpu"
        with target.started(peer(f"p=openai:{server.url}"), None, (), {}) as found:
            assert found.sglang is None
    with OpenAI() as other, target.started(peer(f"p={other.url}"), None, (), {}) as found:
        assert found.sglang is None
        found.flush()
        assert found.state() == {}


def test_a_url_without_a_server_is_one_sentence():
    nobody = target.started(peer("p=http://127.0.0.1:9"), None, (), {})
    with pytest.raises(ServerError, match="p at http://127.0.0.1:9 broke off"), nobody:
        pass


def test_chat_prompts_become_the_templates_ids(tmp_path):
    from sglang_trunc.reference.tokenizer import byte_tokenizer, save_tokenizer

    save_tokenizer(byte_tokenizer(), tmp_path, 1024)
    from evaluation.chat import ChatTemplate

    chat = ChatTemplate(str(tmp_path))
    messages = (Message("user", "Hi"),)
    plain, thinking = chat.ids(messages, Style.CHAT), chat.ids(messages, Style.THINKING)
    tokenizer = chat._tokenizer
    assert tokenizer.decode(plain) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(thinking) == tokenizer.decode(plain) + "<think>\n"
