"""An HTTP endpoint in OpenAI's words for the engine: completions and chat, whole or as a stream of events.

``python -m examples.serve.server MODEL [--device cuda] [--format int8_row]``, with ``kvcore[serve,transformers]``. One
task of the event loop steps the engine in a thread; requests come in, and leave when their client does, between steps.
"""

import argparse
import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.serve.engine import Ask, Engine
from kvcore import KvcoreError


def create_app(engine: Engine, tokenizer: Any, name: str) -> Starlette:
    """The application for an engine and the tokenizer of its model."""
    wake = asyncio.Event()

    async def step() -> None:
        while True:
            await wake.wait()
            wake.clear()
            while engine.busy:
                try:
                    await asyncio.to_thread(engine.step)
                except Exception:
                    logging.getLogger(__name__).exception("a step failed; its requests end")
                    engine.give_up()

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(step())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    def asked(given: dict[str, Any], prompt: list[int], tokens: asyncio.Queue[int | None]) -> Ask:
        """The request for tokens; what is wrong with it raises a ``ValueError`` or an error of kvcore."""
        loop, end = asyncio.get_running_loop(), getattr(tokenizer, "eos_token_id", None)
        return Ask(
            prompt,
            new=int(given.get("max_tokens") or given.get("max_completion_tokens") or 64),
            stop=frozenset() if end is None else frozenset([end]),
            temperature=float(given.get("temperature") or 0.0),
            seed=int(given.get("seed") or 0),
            lane=str(given.get("kv_format", "default")),
            salt=given.get("user"),
            tell=lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token),
        )

    async def pieces(ask: Ask, tokens: asyncio.Queue[int | None], stops: list[str]) -> AsyncIterator[tuple[str, str]]:
        """(text, "") as it comes, at last ("", reason); text that may be the beginning of a stop is held back."""
        text, told, held = "", 0, max([len(stop) - 1 for stop in stops], default=0)
        try:
            while True:
                token = await tokens.get()
                text = tokenizer.decode(ask.answer, skip_special_tokens=True)
                cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
                # A character may need more than one token.
                until = len(text) - held if token is not None and not text.endswith("\ufffd") else told
                until = len(text) if token is None else until
                until = until if cut is None else cut
                if until > told:
                    yield text[told:until], ""
                    told = until
                if token is None or cut is not None:
                    yield "", "stop" if cut is not None else ask.reason or "stop"
                    return
        finally:
            engine.cancel(ask)
            wake.set()

    def endpoint(
        kind: str, prompt_of: Callable[[dict[str, Any]], list[int]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """What answers ``kind``: ``text_completion`` or ``chat.completion``."""
        chat = kind == "chat.completion"

        def body(texts: str, reason: str | None, key: str, **more: Any) -> dict[str, Any]:
            said = {key: {"role": "assistant", "content": texts}} if chat else {"text": texts}
            choice = {"index": 0, "finish_reason": reason, **said}
            return {"id": number, "created": int(time.time()), "model": name, "choices": [choice], **more}

        number = f"cmpl-{uuid.uuid4().hex}"

        async def answer(request: Request) -> Response:
            tokens: asyncio.Queue[int | None] = asyncio.Queue()
            try:
                given = await request.json()
                stops = given.get("stop") or []
                stops = [stops] if isinstance(stops, str) else [str(stop) for stop in stops]
                ask = engine.submit(asked(given, prompt_of(given), tokens))
            except (KvcoreError, ValueError, TypeError, KeyError, AttributeError) as error:
                return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
            wake.set()
            if given.get("stream"):

                async def events() -> AsyncIterator[str]:
                    async for text, reason in pieces(ask, tokens, stops):
                        part = body(text, reason or None, "delta", object=f"{kind}.chunk" if chat else kind)
                        yield f"data: {json.dumps(part)}\n\n"
                    yield "data: [DONE]\n\n"

                return StreamingResponse(events(), media_type="text/event-stream")
            found = [part async for part in pieces(ask, tokens, stops)]
            counts = {"prompt_tokens": len(ask.prompt), "completion_tokens": len(ask.answer)}
            text, reason = "".join(text for text, _ in found), found[-1][1]
            return JSONResponse(
                body(text, reason, "message", object=kind, usage=counts), 500 if reason == "error" else 200
            )

        return answer

    def of_text(given: dict[str, Any]) -> list[int]:
        prompt = given["prompt"]
        return list(tokenizer(prompt).input_ids) if isinstance(prompt, str) else [int(token) for token in prompt]

    def of_chat(given: dict[str, Any]) -> list[int]:
        text = tokenizer.apply_chat_template(given["messages"], tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    return Starlette(
        lifespan=running,
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", endpoint("text_completion", of_text), methods=["POST"]),
            Route("/v1/chat/completions", endpoint("chat.completion", of_chat), methods=["POST"]),
        ],
    )


def main() -> None:
    import torch
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvcore.interop.transformers import PackedModel

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", help="a folder or a name that transformers knows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--format", help="of keys and values; the model's own dtype unless given")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=65536, help="over all requests")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype="auto").to(chosen.device).eval()
    prepared = chosen.device == "cpu" and model.dtype == torch.float32
    packed = PackedModel(model, captured=(8, 16, 32, 64, chosen.requests + 8), prepared=prepared)
    engine = Engine(
        packed, lanes={"default": chosen.format}, drafts=chosen.drafts, budget=512 if chosen.device == "cpu" else 4096,
        max_requests=chosen.requests, max_tokens=chosen.tokens,
    )  # fmt: skip
    app = create_app(engine, AutoTokenizer.from_pretrained(chosen.model), chosen.model)
    uvicorn.run(app, port=chosen.port)


if __name__ == "__main__":
    main()
