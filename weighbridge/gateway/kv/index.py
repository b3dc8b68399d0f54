"""All engines whose KV events are followed: their subscriptions, and the translation of finished prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq.asyncio

from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.kv.discovery import path_for, sources_of
from weighbridge.gateway.kv.names import Names
from weighbridge.gateway.kv.prompt import Prompt, salt_of, token_ids, tokenize_body
from weighbridge.gateway.kv.subscriber import Source, Subscriber
from weighbridge.gateway.kv.watch import Watch
from weighbridge.gateway.kv_address import AUTO
from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient

if TYPE_CHECKING:
    from weighbridge.gateway.driver import Driver

log = logging.getLogger("weighbridge.gateway.kv")
ASK_AGAIN_S = 2.0
TOKENIZE_S = 5.0
TOKENIZE_AGAIN_S = 30.0  # after an engine could not


class KvIndex:
    """Follows the engines that were given `kv_events`. Off the requests' way: all it costs them is one look at a flag.

    Engines of one kind share what is known of prompts' tokens, so that a prompt that one has answered is recognised on
    another.
    """

    def __init__(self, driver: Driver, block_bytes: int) -> None:
        self._driver = driver
        self._block_bytes = block_bytes
        self._context: zmq.asyncio.Context | None = None
        self._names: dict[str, Names] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.watches: dict[str, Watch] = {}

    def start(self) -> None:
        """Begins following every engine of the driver that is configured to be."""
        for endpoint in self._driver.endpoints.values():
            self.add(endpoint)

    def add(self, endpoint: Endpoint) -> None:
        """Begins following an engine, if it is configured to be."""
        if endpoint.settings.kv_events is None:
            return
        if self._context is None:
            self._context = zmq.asyncio.Context()
        names = self._names.setdefault(endpoint.settings.kind, Names())
        watch = Watch(endpoint, names, self._block_bytes, self._driver.feed)
        self.watches[endpoint.name] = endpoint.kv = watch
        self._tasks[endpoint.name] = asyncio.get_running_loop().create_task(self._follow(watch))

    async def remove(self, endpoint: Endpoint) -> None:
        """Ends following one engine."""
        endpoint.kv = None
        self.watches.pop(endpoint.name, None)
        task = self._tasks.pop(endpoint.name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Ends everything."""
        for watch in list(self.watches.values()):
            await self.remove(watch.endpoint)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def describe(self, name: str) -> dict[str, Any] | None:
        """What is known of an engine's events, for operators; None where they are not followed."""
        watch = self.watches.get(name)
        return None if watch is None else watch.describe()

    async def _follow(self, watch: Watch) -> None:
        endpoint = watch.endpoint
        client = HttpClient(ClientLimits(connect_s=TOKENIZE_S, idle_s=2.0), endpoint.ssl_context)
        try:
            watch.sources = await self._sources(watch, client)
            assert self._context is not None
            async with asyncio.TaskGroup() as group:
                for source in watch.sources:
                    subscriber = Subscriber(self._context, source, watch, watch.counts)
                    watch.subscribers.append(subscriber)
                    group.create_task(self._subscribe(subscriber))
                await self._translate(watch, client)
        except Exception:  # nothing of this may end the gateway, nor end unseen
            log.exception("KV events of %s are no longer followed", endpoint.name)
            watch.problem = "its events are no longer followed; the log tells why"
        finally:
            await client.close()

    async def _subscribe(self, subscriber: Subscriber) -> None:
        while True:
            try:
                await subscriber.run()
            except Exception:  # a surprise in what an engine sends must not end its subscription
                log.exception("KV events of %s", subscriber.source.endpoint)
            subscriber.read_again()
            await asyncio.sleep(ASK_AGAIN_S)

    async def _sources(self, watch: Watch, client: HttpClient) -> list[Source]:
        """As configured, or once the engine has told."""
        endpoint, settings = watch.endpoint, watch.endpoint.settings
        if settings.kv_events != AUTO:
            assert settings.kv_events is not None
            return [Source(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic)]
        path = path_for(settings.kind)
        while True:
            try:
                reply = await client.request("GET", _url(endpoint, path), headers=endpoint.probe_headers())
                if reply.status == 200:
                    told = msgspec.json.decode(reply.body)
                    sources, watch.problem = sources_of(settings.kind, told, endpoint.origin.host)
                    if sources:
                        return sources
                else:
                    watch.problem = f"it answers {reply.status} to {path}: give `kv_events` an address"
            except (ExchangeFailed, msgspec.DecodeError) as error:
                watch.problem = f"{path}: {error}"
            await asyncio.sleep(ASK_AGAIN_S)

    async def _translate(self, watch: Watch, client: HttpClient) -> None:
        while True:
            await watch.wanted.wait()
            watch.wanted.clear()
            while watch.prompts:
                prompt = watch.prompts.popleft()
                try:
                    await self._learn(watch, client, prompt)
                except Exception:  # one odd prompt must not end it
                    log.exception("the prompt of a request to %s", watch.endpoint.name)

    async def _learn(self, watch: Watch, client: HttpClient, prompt: Prompt) -> None:
        watch.expects_events(prompt)
        if watch.knows(prompt):
            watch.confirm(prompt)
            return
        endpoint = watch.endpoint
        body: dict[str, Any] = msgspec.json.decode(prompt.body)
        model = str(body.get("model") or "")
        model = endpoint.settings.aliases.get(model, model)
        tokens = token_ids(body)
        if tokens is None:
            asked = tokenize_body(prompt, body, model)
            if asked is None or time.monotonic() < watch.tokenize_after_s:
                return
            tokens = await self._tokenize(watch, client, asked)
        if tokens is not None:
            kind = endpoint.settings.kind
            others = [w for w in self.watches.values() if w.endpoint.settings.kind == kind]
            watch.learn(prompt, tokens, model, salt_of(prompt, body), others)

    async def _tokenize(self, watch: Watch, client: HttpClient, asked: bytes) -> list[int] | None:
        endpoint = watch.endpoint
        headers = [*endpoint.probe_headers(), ("content-type", "application/json")]
        url = _url(endpoint, "/tokenize")
        try:
            reply = await client.request("POST", url, body=asked, headers=headers, timeout_s=TOKENIZE_S)
            value = msgspec.json.decode(reply.body) if reply.status == 200 else None
            tokens = value.get("tokens") if isinstance(value, dict) else None
            if isinstance(tokens, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
                watch.problem = ""
                return tokens
            watch.problem = f"/tokenize answers {reply.status} without tokens, so its events cannot be translated"
        except (ExchangeFailed, msgspec.DecodeError) as error:
            watch.problem = f"/tokenize: {error}"
        watch.tokenize_after_s = time.monotonic() + TOKENIZE_AGAIN_S
        return None


def _url(endpoint: Endpoint, path: str) -> str:
    origin = endpoint.origin
    return f"{origin.scheme}://{origin.authority}{origin.path(path)}"
