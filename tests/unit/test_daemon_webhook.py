"""Webhooks against a real HTTP server that answers, refuses, hangs and goes away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
from aiohttp import web

from hookd.errors import ConfigError
from hookd.tool.config import Webhook, check
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.incidents.webhook import Pace, Sender, message
from tests.support.processes import PATIENCE_S, wait_until

TARGET = (11, 12345, 99)
SECRET = b"a secret of some bytes"
QUICK = Pace(window_s=0.3, timeout_s=PATIENCE_S, first_s=0.01, longest_s=0.05)
IMPATIENT = dataclasses.replace(QUICK, timeout_s=2.0)
DOCS = Path(__file__).parents[2] / "docs" / "incidents.md"


def nan(seq, kind="nan", **more):
    return {
        "seq": seq,
        "time": 1000.0 + seq,
        "kind": kind,
        "message": f"{kind} {seq}",
        "module": f"fc{seq}",
        "step": 3,
        **more,
    }


async def until(condition):
    await asyncio.get_running_loop().run_in_executor(None, wait_until, condition)


class Hook:
    """A server with given answers; `posts` are the headers and bodies that it got."""

    def __init__(self):
        self.posts = []
        self.answers = []
        self.hangs = asyncio.Event()
        self.url = ""

    @property
    def seqs(self):
        messages = [json.loads(body) for _, body in self.posts]
        return [[int(incident["message"].split()[1]) for incident in one["incidents"]] for one in messages]

    async def answer(self, request):
        self.posts.append((request.headers.copy(), await request.read()))
        status = self.answers.pop(0) if self.answers else 200
        if status == "hang":
            await self.hangs.wait()
        headers = {"Location": f"{self.url}/elsewhere"} if status == 302 else {}
        return web.Response(status=200 if status == "hang" else status, headers=headers)

    async def got(self, number):
        await until(lambda: len(self.posts) >= number)


@contextlib.asynccontextmanager
async def listening(port=0):
    hook, app = Hook(), web.Application()
    app.router.add_post("/{path:.*}", hook.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    hook.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hook
    finally:
        hook.hangs.set()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def sending(state, url, pace=QUICK, clock=time.monotonic, **config):
    """A daemon's store and sender, for as long as the block."""
    store = IncidentStore.open(state)
    sender = Sender(Webhook(url, SECRET, **config), store, pace=pace, clock=clock)
    store.listen(sender)
    task = asyncio.create_task(sender.run())
    try:
        yield store
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(store.close)


async def settled(store):
    """Wait until no notice is left."""
    name = store._receivers[0].name
    await until(lambda: not store.undelivered(name, 10))


def test_a_message_has_the_documented_form():
    row = {"id": 12, "pid": 4, "user": "", "run": "train.py", "rank": "0", "kind": "nan", "module": 'fc"1é', "step": 3,
           "time": 1000.5, "last": 1001.5, "message": "first \x1b[31mNaN", "count": 2, "owner": 0, "detail": {}}  # fmt: skip
    body = json.loads(message([row], instance="node1", url="http://127.0.0.1:9465", labels={"team": "a"}))
    assert body == {
        "version": 1,
        "instance": "node1",
        "url": "http://127.0.0.1:9465",
        "labels": {"team": "a"},
        "incidents": [
            {"id": 12, "time": 1000.5, "last": 1001.5, "count": 2, "user": "", "run": "train.py", "rank": "0", "pid": 4,
             "kind": "nan", "module": 'fc"1é', "step": 3, "message": "first  [31mNaN", "command": "hookd report '#12'"}
        ],
        "truncated": 0,
    }  # fmt: skip
    documented = json.loads(re.search(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)[1])
    assert documented.keys() == body.keys()
    assert documented["incidents"][0].keys() == body["incidents"][0].keys()
    (unstored,) = json.loads(message([{**row, "id": None}], instance="", url="", labels={}))["incidents"]
    assert "command" not in unstored


def test_incidents_of_two_users_with_one_run_come_in_messages_of_their_own(tmp_path):
    async def run():
        async with listening() as hook, sending(tmp_path, hook.url) as store:
            store.add((12, 1, 1), "llama", "0", [nan(1)], owner=0)
            await hook.got(1)
            store.add((11, 1, 1), "llama", "0", [nan(2)], owner=4_000_000_001)
            store.add((12, 1, 1), "llama", "0", [nan(3)], owner=0)
            await hook.got(3)
            await settled(store)
            messages = [json.loads(body) for _, body in hook.posts]
            users = sorted([incident["user"] for incident in one["incidents"]] for one in messages)
            assert users == [["4000000001"], ["root"], ["root"]]

    asyncio.run(run())


def test_a_message_is_posted_until_it_is_taken_and_can_be_verified_each_time(tmp_path, caplog):
    snippet = {}
    exec(re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1], snippet)

    critical = {"severity": "critical"}

    async def run():
        async with listening() as hook, sending(tmp_path, hook.url + "/x", IMPATIENT, labels=critical) as store:
            hook.answers = [500, "hang", 429, 503]
            store.add(TARGET, "r", "0", [nan(1)])
            await hook.got(5)
            await settled(store)
            assert len(hook.posts) == 5
            return hook.posts

    posts = asyncio.run(run())
    assert len({headers["webhook-id"] for headers, _ in posts}) == 1
    for headers, body in posts:
        assert snippet["is_genuine"](headers, body, SECRET)
        assert not snippet["is_genuine"](headers, body + b" ", SECRET)
        assert not snippet["is_genuine"]({**headers, "webhook-timestamp": "1"}, body, SECRET)
        assert json.loads(body)["labels"] == critical
    messages = [record.message for record in caplog.records if "webhook" in record.name]
    assert [("cannot be sent" in one, "accepts incidents again" in one) for one in messages] == [
        (True, False),
        (False, True),
    ]
    assert "/x" not in caplog.text, "an address may hold a secret"


def test_each_time_that_a_receiver_fails_and_recovers_is_logged_once(tmp_path, caplog):
    async def run():
        async with listening() as hook, sending(tmp_path, hook.url, IMPATIENT) as store:
            for number in (1, 2):
                hook.answers = [503, 503]
                store.add(TARGET, "r", "0", [nan(number, kind=f"kind {number}")])
                await hook.got(3 * number)
                await settled(store)
            store.add(TARGET, "r", "0", [nan(3, kind="kind 3")])
            await hook.got(7)
            await settled(store)

    asyncio.run(run())
    messages = [record.message for record in caplog.records if "webhook" in record.name]
    assert ["accepts incidents again" in one for one in messages] == [False, True] * 2


def test_what_was_not_delivered_is_after_a_restart_and_only_that(tmp_path):
    async def run():
        async with listening() as hook:
            url, port = hook.url, int(hook.url.rpartition(":")[2])
            async with sending(tmp_path, url) as store:
                store.add(TARGET, "r", "0", [nan(1)])
                await hook.got(1)
                await settled(store)
        async with sending(tmp_path, url) as store:  # nobody listens
            store.add(TARGET, "r", "0", [nan(1), nan(2)])
            await asyncio.to_thread(store.flush)
        async with listening(port) as hook, sending(tmp_path, url) as store:
            store.add(TARGET, "r", "0", [nan(1), nan(2), nan(3, kind="hang")])
            await hook.got(2)
            await settled(store)
            return hook.seqs

    assert sorted(asyncio.run(run())) == [[2], [3]]


def test_a_storm_is_collapsed_by_run_rank_and_kind(tmp_path):
    async def run():
        now_s = [1000.0]
        async with listening() as hook, sending(tmp_path, hook.url, clock=lambda: now_s[0]) as store:
            store.add(TARGET, "r", "0", [nan(1)])
            await hook.got(1)
            store.add(TARGET, "r", "0", [nan(seq) for seq in range(2, 102)])
            store.add(TARGET, "r", "1", [nan(200)])
            await hook.got(2)
            now_s[0] += QUICK.window_s
            await hook.got(3)
            await settled(store)
            return [json.loads(body) for _, body in hook.posts], hook.seqs

    messages, seqs = asyncio.run(run())
    assert seqs == [[1], [200], list(range(2, 22))]
    assert [one["truncated"] for one in messages] == [0, 0, 80]
    assert {incident["rank"] for incident in messages[2]["incidents"]} == {"0"}


def test_more_than_memory_holds_waits_in_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.incidents.webhook.MAX_WAITING", 5)

    async def run():
        async with listening() as hook, sending(tmp_path, hook.url) as store:
            hook.answers = [500] * 3
            store.add(TARGET, "r", "0", [nan(seq, kind=f"kind{seq}") for seq in range(1, 31)])
            await hook.got(33)
            await settled(store)
            return hook.seqs

    assert {seq for seqs in asyncio.run(run()) for seq in seqs} == set(range(1, 31))


def test_a_refusal_is_reported_and_the_next_comes_and_a_redirect_is_one(tmp_path, caplog):
    async def run():
        async with listening() as hook, sending(tmp_path, hook.url, kinds=frozenset({"nan", "hang"})) as store:
            hook.answers = [400, 302]
            store.add(TARGET, "r", "0", [nan(1), nan(2, kind="hang"), nan(3, kind="option")])
            await hook.got(2)
            await settled(store)
            return hook.seqs

    assert sorted(asyncio.run(run())) == [[1], [2]]
    assert caplog.text.count("rejected incidents") == 2


# ---- the configuration


def read(tmp_path, text):
    path = tmp_path / "hookd.toml"
    path.write_text(text)
    return check(path).webhooks


def test_webhooks_are_read_with_their_secrets(tmp_path):
    (tmp_path / "secret").write_text("whsec_" + base64.b64encode(SECRET).decode() + "\n")
    first, second = read(
        tmp_path,
        f'[[webhook]]\nurl = "https://user:pw@a.b/c?d"\nsecret_file = "{tmp_path}/secret"\nkinds = ["nan"]\n'
        '[[webhook]]\nurl = "http://a.b:8/"\nsecret = "plain"\nlabels = { severity = "critical" }\n',
    )
    assert (first.secret, first.kinds, first.host) == (SECRET, {"nan"}, "https://a.b")
    assert (second.secret, second.labels) == (b"plain", {"severity": "critical"})
    assert "plain" not in repr(second)
    assert first.name != second.name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[webhook]\nurl = 1", "write [[webhook]]"),
        ("[[webhook]]\nkinds = ['nan']", "[[webhook]] 1 has no url"),
        ("[[webhook]]\nurl = 'ftp://a'", "write https://HOST/PATH"),
        ("[[webhook]]\nurl = 'http://a'\nkinds = 'nan'", "is not a list of kinds"),
        ("[[webhook]]\nurl = 'http://a'\nsecret_file = '/nonexistent'", "cannot be read: No such file"),
        ("[[webhook]]\nurl = 'http://a'\nsecret = 'x'\nsecret_file = '/dev/null'", "is empty"),
        ("[[webhook]]\nurl = 'http://a'\nlabels = { 'a b' = 1 }", "is not a valid name"),
        ("[[webhook]]\nurl = 'http://a'\nsecrets = 'x'", "did you mean 'secret'?"),
        ("[[webhook]]\nurl = 'http://a'\n[[webhook]]\nurl = 'http://a'", "the same url"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, why):
    with pytest.raises(ConfigError) as found:
        read(tmp_path, text)
    assert why in str(found.value)


def test_a_secret_that_is_wrong_is_not_repeated(tmp_path):
    with pytest.raises(ConfigError) as found:
        read(tmp_path, "[[webhook]]\nurl = 'http://a'\nsecret = 'whsec_=hidden'")
    assert "is not base64" in str(found.value)
    assert "hidden" not in str(found.value)


def test_the_webhook_of_the_example_is_one(tmp_path):
    example = (Path(__file__).parents[2] / "examples" / "hookd.toml").read_text()
    secret = tmp_path / "secret"
    secret.write_text("x")
    shown = example.partition("# [[webhook]]")[2].replace("/etc/hookd/webhook.secret", str(secret))
    (one,) = read(tmp_path, "[[webhook]]" + shown.replace("\n# ", "\n"))
    assert one.labels == {"severity": "critical"}
