"""Schemathesis against both listeners' own OpenAPI documents: `python -m tests.fuzz.openapi SCHEMATHESIS [SECONDS]`.

A gateway runs in front of a fake engine; the tool (from its own environment, given by path) makes valid and invalid
requests from the documents and checks statuses, bodies and content types. Exit status 1 if it finds anything.
"""

from __future__ import annotations

import asyncio
import sys

from tests.support.gateway import answer, front
from tests.support.loop import run
from tests.support.upstream import FakeUpstream
from weighbridge.gateway.settings import InstanceSettings

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,positive_data_acceptance,unsupported_method,allow_header_conformance,missing_required_header"
)


async def schemathesis(tool: str, url: str, seconds: int, *more: str) -> int:
    """One run; returns its exit status."""
    command = [tool, "run", f"{url}/openapi.json", "--checks", CHECKS, "--max-time", str(seconds), *more]
    process = await asyncio.create_subprocess_exec(*command, "--seed", "1", "--phases", "examples,coverage,fuzzing")
    return await process.wait()


async def main(tool: str, seconds: int) -> int:
    async with FakeUpstream(answer) as upstream:
        # no model list: any model is accepted, so that a request is refused for its form alone
        instance = InstanceSettings(name="i0", url=upstream.url, kind="vllm")
        async with front(instances=(instance,)) as f:
            # an engine for each kind of endpoint; unknown models are answered 404, which the document allows
            client = await schemathesis(tool, f.url, seconds, "--exclude-path", "/v1/models/{model}")
            admin_url = f"http://127.0.0.1:{f.gateway.admin_port}"
            admin = await schemathesis(tool, admin_url, seconds, "--exclude-path-regex", "/instances|/reload")
            return max(client, admin)


if __name__ == "__main__":
    sys.exit(run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60), 600.0))
