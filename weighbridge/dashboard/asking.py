"""The pages with questions behind them: `/whatif` and "what would another policy have chosen" on `/decisions`.

They are the only ones that start work, so what they accept is checked here: logs by number out of a fixed list,
policies by known name, numbers within bounds.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from weighbridge.core.errors import WeighbridgeError
from weighbridge.core.instance import InstanceSpec
from weighbridge.dashboard.asker import Asker, shown
from weighbridge.dashboard.html import Html
from weighbridge.dashboard.hub import Hub
from weighbridge.dashboard.jobs import Job, Jobs
from weighbridge.dashboard.pages import decisions, whatif
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import Snapshot
from weighbridge.dashboard.view import View
from weighbridge.dashboard.whatif import MOST_POLICIES, Question, read_specs
from weighbridge.routing.policies.registry import policy_names

MOST_LOAD = 20.0
MOST_COPIES = 64


class Questions:
    """Holds the jobs and the answers that were given."""

    def __init__(self, hub: Hub, jobs: Jobs) -> None:
        self.hub = hub
        self.jobs = jobs
        self.asker = Asker()
        self.refused = ""
        self._specs: dict[tuple[str, int], tuple[str, dict[str, InstanceSpec]]] = {}

    def whatif(self, snapshot: Snapshot, query: Query) -> View:
        """The what-if page."""
        logs = self.jobs.logs(snapshot.log)
        job = self.jobs.get(query.get("job"))
        chosen = self._chosen(logs, query, job)
        policy, specs, refused = "", dict[str, InstanceSpec](), self.refused
        if chosen is not None:
            try:
                policy, specs = self._read(chosen)
            except (WeighbridgeError, OSError) as error:
                refused = str(error)
        return whatif.page(query, logs, chosen, specs, policy, policy_names(), job, refused)

    def logs(self) -> list[Path]:
        """Event logs that may be read."""
        return self.jobs.logs(self.hub.snapshot.log)

    def _chosen(self, logs: list[Path], query: Query, job: Job | None) -> Path | None:
        text = query.get("log")
        if text.isdigit() and len(text) < 4 and int(text) < len(logs):
            return logs[int(text)]
        if job is not None and Path(job.question.log) in logs:
            return Path(job.question.log)
        return logs[0] if logs else None

    def _read(self, path: Path) -> tuple[str, dict[str, InstanceSpec]]:
        key = (str(path), min(path.stat().st_size, 1 << 20))
        if key not in self._specs:
            if len(self._specs) > 50:
                self._specs.clear()
            self._specs[key] = read_specs(path)
        return self._specs[key]

    def start(self, form: Query) -> str:
        """Act on the posted form; returns the address to show. What cannot be done is said on that page."""
        self.refused = ""
        if form.get("action") == "cancel":
            self.jobs.cancel()
            self.hub.touch()
            return "/whatif"
        try:
            job = self.jobs.start(self._question(form))
        except (ValueError, WeighbridgeError) as error:
            self.refused = str(error)
            self.hub.touch()
            return "/whatif"
        self.hub.touch()
        return f"/whatif?job={job.number}"

    def _question(self, form: Query) -> Question:
        path = self._chosen(self.jobs.logs(self.hub.snapshot.log), form, None)
        if path is None:
            raise ValueError("no event log is known")
        _, specs = self._read(path)
        policies = tuple(name for name in form.all("policy") if name in policy_names())
        if not policies or len(policies) > MOST_POLICIES:
            raise ValueError(f"choose one to {MOST_POLICIES} policies")
        start, load = _number(form, "start", 0.0), _number(form, "load", 1.0)
        end = _number(form, "end", math.inf)
        seeds = int(_number(form, "seeds", 3))
        if not (0 < load <= MOST_LOAD and start < end and 1 <= seeds <= 10):
            raise ValueError(f"load must be above 0 and at most {MOST_LOAD:g}, the window not empty, seeds 1 to 10")
        counts = {name: int(_number(form, f"n_{name}", 1)) for name in specs}
        if any(n > MOST_COPIES for n in counts.values()):
            raise ValueError(f"at most {MOST_COPIES} copies of an instance")
        return Question(
            log=str(path), policies=policies, start_s=start, end_s=None if math.isinf(end) else end, load=load,
            counts={name: n for name, n in counts.items() if n != 1}, seeds=seeds,
        )  # fmt: skip

    def report(self, query: Query) -> bytes | None:
        """A finished job's answer as indented JSON."""
        job = self.jobs.get(query.get("job"))
        if job is None or job.answer is None:
            return None
        return msgspec.json.format(msgspec.json.encode(job.answer), indent=2)

    def decisions(self, snapshot: Snapshot, query: Query) -> View:
        """The decisions page, with the answer of another policy where one was asked."""
        policies = policy_names() if snapshot.log else []
        return decisions.page(snapshot, query, policies, self._asked(snapshot, query))

    def _asked(self, snapshot: Snapshot, query: Query) -> Html | None:
        policy = query.get("ask")
        if not policy or not snapshot.log:
            return None
        answer = self.asker.known(snapshot.log, query.get("id"), policy)
        return shown(answer, policy) if answer is not None else None

    async def prepare(self, query: Query) -> None:
        """Get the answer that `decisions` will show, if its query asks for one that is not known."""
        snapshot, policy = self.hub.snapshot, query.get("ask")
        decision = snapshot.decision(query.get("id"))
        if policy in policy_names() and decision is not None and snapshot.log:
            await self.asker.ask(Path(snapshot.log), decision.id, policy)
            self.hub.touch()

    async def close(self) -> None:
        """Stop what runs."""
        await self.jobs.close()


def _number(form: Query, name: str, default: float) -> float:
    text = form.get(name).replace(",", "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: '{text[:20]}' is not a number from 0 on")
    return value
