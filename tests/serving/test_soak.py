"""Much and random: bodies made from our own OpenAPI document, and hundreds of requests of which many are dropped."""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_random_bodies_find_no_server_error_and_no_answer_outside_the_schema(server):
    """Schemathesis: what its schema allows and what it forbids, both kinds, against every path."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = [
        checks.not_a_server_error, schemathesis.specs.openapi.checks.status_code_conformance,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
    ]  # fmt: skip
    num_calls = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case):
            nonlocal num_calls
            num_calls += 1
            if isinstance(case.body, dict) and num_calls % 2:
                case.body["model"] = "tiny"  # else hardly any body gets past the model's name
            response = case.call(timeout=60)
            case.validate_response(response, checks=wanted)

        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            with suppress(Unsatisfiable):  # some paths take nothing that could be wrong
                given(case=operation.as_strategy(generation_mode=mode))(run)()
    assert num_calls > 60
    server.settle()


def open_files(server):
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


async def soak(url, count, at_once, seed, retries=True):
    """Send ``count`` short requests, a fifth of them dropped at a random moment; return how each ended."""
    draw, gate = random.Random(seed), asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as http:

        async def one(number, patience):
            body = {"model": "tiny", "prompt": "the " * draw.randrange(1, 9) + str(draw.randrange(9))}
            body |= {"max_tokens": draw.randrange(1, 25), "n": draw.choice([1, 1, 2]), "stream": draw.random() < 0.7}
            while True:
                async with gate:
                    try:
                        async with asyncio.timeout(patience):
                            answer = await http.post("/v1/completions", json=body)
                    except TimeoutError:
                        return "dropped"
                    except httpx.TransportError:
                        return "lost"
                if answer.status_code in (429, 503) and retries:
                    await asyncio.sleep(0.05)
                    continue
                if answer.status_code == 503 or '"error"' in answer.text:
                    return answer.json()["error"]["code"] if answer.status_code == 503 else "told"
                return "done" if answer.status_code == 200 else str(answer.status_code)

        tasks = []
        for number in range(count):
            patience = draw.uniform(0.001, 0.1) if draw.random() < 0.2 else None
            tasks.append(asyncio.create_task(one(number, patience)))
            if number % at_once == 0:
                await asyncio.sleep(0.01)
        return await asyncio.gather(*tasks)


@pytest.mark.slow
def test_three_hundred_requests_with_a_fifth_dropped_leave_nothing_behind(server):
    """MICROLLM_SOAK=5000 makes it five thousand, outside CI."""
    count = int(os.environ.get("MICROLLM_SOAK", "300"))
    asyncio.run(soak(server.url, 40, 16, seed=1))
    server.settle()
    server.http.get("/health")
    files = open_files(server)
    endings = asyncio.run(soak(server.url, count, 24, seed=2))
    assert set(endings) <= {"done", "dropped"}, {each: endings.count(each) for each in set(endings)}
    assert endings.count("dropped") > count / 20
    assert endings.count("done") > count / 2
    server.settle()
    server.wait_until(lambda: open_files(server) <= files + 2)
    assert server.complete(max_tokens=3).status_code == 200


@pytest.mark.slow
def test_a_restart_in_the_middle_loses_what_ran_and_nothing_else(serve):
    """The first server is told to stop while requests come; each is answered, told so, or refused at the door."""
    with serve("--max-rows", "2", "--max-queue", "64", "--drain-s", "5") as first:

        async def run():
            work = asyncio.create_task(soak(first.url, 30, 12, seed=3, retries=False))
            await asyncio.sleep(0.3)
            first.process.send_signal(signal.SIGTERM)
            return await work

        endings = asyncio.run(run())
        assert first.process.wait(30) == 0
    assert set(endings) <= {"done", "dropped", "shutting_down", "told", "lost"}
    assert endings.count("done") > 0
    with serve("--max-rows", "2") as second:
        again = asyncio.run(soak(second.url, 20, 12, seed=3))
        assert set(again) <= {"done", "dropped"}
        second.settle()
