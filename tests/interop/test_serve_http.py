"""The HTTP endpoint of ``examples/serve``, through its test client: no network."""

import json

import pytest
from starlette.testclient import TestClient

from examples.serve import Ask, Engine
from examples.serve.server import create_app
from kvcore.interop.transformers import PackedModel
from tests.support import tiny_models as models


class Letters:
    """A tokenizer: one token a letter."""

    eos_token_id = None

    def __call__(self, text, **_):
        return type("Encoded", (), {"input_ids": [ord(letter) % models.VOCABULARY for letter in text]})

    def decode(self, ids, **_):
        return "".join(chr(token + 32) for token in ids)

    def apply_chat_template(self, messages, **_):
        return "".join(f"{one['role'][0]}:{one['content']}\n" for one in messages)


@pytest.fixture(scope="module")
def packed():
    return PackedModel(models.multi_head())


@pytest.fixture
def engine(packed):
    return Engine(packed, max_requests=4, max_tokens=256, block_tokens=8, drafts=2)


def expected(packed, text, new):
    ask = Ask(Letters()(text).input_ids, new=new)
    list(Engine(packed, max_requests=1, max_tokens=256).stream(ask))
    return Letters().decode(ask.answer)


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]


def test_completions_chat_and_streams(packed, engine):
    whole = expected(packed, "Hello", 12)
    talk = [{"role": "user", "content": "Hi"}]
    with TestClient(create_app(engine, Letters(), "tiny")) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        asked = {"prompt": "Hello", "max_tokens": 12}
        found = client.post("/v1/completions", json=asked).json()
        assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (whole, "length")
        assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 12}
        parts = events(client.post("/v1/completions", json={**asked, "stream": True}))
        assert len(parts) > 3
        assert "".join(part["text"] for part in parts) == whole
        assert parts[-1]["finish_reason"] == "length"
        # A stop of two letters, which the first of them alone must not give away.
        stop = {**asked, "stop": [whole[4:6]], "stream": True}
        parts = events(client.post("/v1/completions", json=stop))
        assert "".join(part["text"] for part in parts) == whole[: whole.index(whole[4:6])]
        assert parts[-1]["finish_reason"] == "stop"
        chat = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 6}).json()
        assert chat["choices"][0]["message"]["content"] == expected(packed, "u:Hi\n", 6)
        parts = events(client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 6, "stream": True}))
        assert "".join(part["delta"]["content"] for part in parts) == chat["choices"][0]["message"]["content"]


def test_what_is_wrong_is_said(engine, packed, monkeypatch):
    with TestClient(create_app(engine, Letters(), "tiny")) as client:
        wrong = [{}, {"prompt": ""}, {"prompt": "a", "max_tokens": 999}, {"prompt": "a", "kv_format": "x"}, [1]]
        # These would fail the step, and with it everybody.
        wrong += [{"prompt": "a", "user": 5}, {"prompt": "a", "user": ""}, {"prompt": [1 << 70]}]
        wrong += [{"prompt": [models.VOCABULARY], "max_tokens": 2}]
        for given in wrong:
            response = client.post("/v1/completions", json=given)
            assert response.status_code == 400
            assert response.json()["error"]["message"]
        # A step that fails is the end of its requests; the next one is served.
        with monkeypatch.context() as patched:
            patched.setattr(packed.model, "forward", lambda **_: 1 / 0)
            response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert (response.status_code, response.json()["choices"][0]["finish_reason"]) == (500, "error")
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert not engine.busy
    assert engine.lanes["default"].cache.requests == ()
