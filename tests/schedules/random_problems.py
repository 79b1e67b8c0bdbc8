"""Hypothesis strategies for problems and for remainders of their plans. `relaxed`: settings of tests that plan."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from recycle_schedules import Plan, Problem, Worker

# A plan takes some hundredths of a second, so `make test`, which draws the same examples each time, draws fewer.
EXAMPLES = 20 if settings.default.derandomize else 60
relaxed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

TIMES = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 0.0137, 7.3])


@st.composite
def problems(draw, most_pipelines=4, most_stages=4, most_microbatches=5, dead=True, **fixed):
    """Any whole step: shape, deaths (with a live worker left at each stage), durations, memory, latencies, speeds."""
    D = draw(st.integers(1, most_pipelines))
    P = draw(st.integers(1, most_stages))
    counts = st.integers(0, most_microbatches)
    keys = {
        "pipelines": D,
        "stages": P,
        "microbatches": draw(counts | st.lists(counts, min_size=D, max_size=D)),
        "failed": draw(deaths(D, P)) if dead else [],
        "durations": draw(durations(P)),
        "backward": draw(st.sampled_from(["decoupled", "coupled", "mixed"])),
        "optimizer": draw(st.sampled_from(["staggered", "barrier", "none"])),
        "memory_limit": draw(memory(D, P)),
        "i_release": draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])),
        "send": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        "send_rerouted": draw(st.sampled_from([None, 0.0, 0.7])),
        "allreduce": draw(st.sampled_from([0.0, 0.5])),
        "reroute": draw(st.sampled_from(["failed_only", "any"])),
        "speed": draw(st.dictionaries(worker_keys(D, P), st.sampled_from([0.5, 0.8, 1.25]), max_size=2)),
    }
    if (keys | fixed)["backward"] == "mixed":
        keys["whole"] = sorted(draw(st.sets(st.integers(0, P - 1))))
    return Problem.from_json(keys | fixed)


@st.composite
def linked(draw, **fixed):
    """Any whole step on up to three hosts in two zones, with links of any latency and bandwidth."""
    p = draw(problems(send=0.0, send_rerouted=None, **fixed))
    names = st.sampled_from(["a", "b", "c"])
    hosts = [[draw(names) for _ in range(p.stages)] for _ in range(p.pipelines)]
    known = sorted({host for row in hosts for host in row})
    link = st.fixed_dictionaries(
        {}, optional={"latency": st.sampled_from([0.0, 0.05, 0.7, 5.0]), "bandwidth": st.sampled_from([1.0, 20.0])}
    )
    kinds = st.fixed_dictionaries({}, optional=dict.fromkeys(["within_host", "between_hosts", "between_zones"], link))
    pair = draw(st.none() | st.tuples(st.sampled_from(known), st.sampled_from(known), link))
    links = {
        "hosts": hosts,
        "zones": {host: draw(st.sampled_from(["east", "west"])) for host in known},
        **draw(kinds),
        "measured": [] if pair is None else [list(pair)],
        "bytes": draw(st.sampled_from([0, 1.5]) | st.lists(st.just(3.0), min_size=p.stages - 1, max_size=p.stages - 1)),
    }
    return p.replace(links=links)


@st.composite
def sized(draw, **fixed):
    """Any whole step whose workers have just enough bytes, so that a death may change limits and modes."""
    p = draw(problems(**fixed))
    sizes = st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0])
    names = ("weights", "state", "sums", "gradient", "boundary", "flight", "waiting", "op", "whole_op")
    stages = [{name: draw(sizes) for name in names} for _ in range(p.stages)]
    stages = [of | {"copies": draw(st.integers(0, 2)), "pipelines": p.pipelines} for of in stages]
    memory = {"capacity": draw(st.floats(10, 60)), "stages": stages, "least": 1}
    if draw(st.booleans()):
        memory["recomputed"] = [of | {"flight": of["flight"] / 8} for of in stages]
    return p.replace(memory=memory)


@st.composite
def layered(draw, most_layers=4, **fixed):
    """Any whole step of a model that is given by its layers: up to `most_layers` more layers than stages."""
    p = draw(problems(**fixed))
    count = p.stages + draw(st.integers(0, most_layers))
    numbers = st.lists(TIMES | st.just(0.0), min_size=count, max_size=count)
    layers = {key: draw(numbers) for key in ("F", "I", "W")}
    for key in draw(st.sets(st.sampled_from(["O", "bytes", "activation_bytes"]))):
        layers[key] = draw(numbers)
    capacity = draw(st.none() | st.sampled_from([5.0, 20.0, 60.0]))
    return p.replace(durations=None, layers=layers, capacity_bytes=capacity)


@st.composite
def deaths(draw, D, P):
    dead = [[d, s] for s in range(P) for d in draw(st.sets(st.integers(0, D - 1), max_size=D - 1))]
    return draw(st.sampled_from([dead, dead[:1], []]))


def worker_keys(D, P):
    return st.tuples(st.integers(0, D - 1), st.integers(0, P - 1)).map(lambda w: f"{w[0]},{w[1]}")


@st.composite
def durations(draw, P):
    kinds = draw(st.sets(st.sampled_from("FIWBO")))
    per_stage = st.lists(TIMES, min_size=P, max_size=P)
    return {kind: draw(TIMES | per_stage) for kind in sorted(kinds)}


@st.composite
def memory(draw, D, P):
    limit = st.integers(1, 6)
    return draw(
        st.none()
        | limit
        | st.lists(limit | st.none(), min_size=P, max_size=P)
        | st.integers(0, 3).map(lambda k: {"base": "1f1b", "extra": k})
        | st.dictionaries(worker_keys(D, P), limit, max_size=3).map(lambda m: {"per_worker": m, "default": 3})
    )


@st.composite
def remainders(draw, plan: Plan):
    """The remainder of a plan (of a whole step, or of a remainder) after some workers die at some time.

    A tensor survives if its sender lives, because senders keep the tensors that they sent. Tensors of dead workers
    survive at random. Returns (problem, holders). holders: tensor -> live workers that hold it.
    """
    p = plan.problem
    now = draw(st.floats(0, max(plan.makespan, 0.1)))
    alive = {s: draw(st.integers(0, len(p.live[s]) - 1)) for s in range(p.stages)}
    keep = {Worker(p.live[s][k], s) for s, k in alive.items()}
    mortal = [w for w in p.workers() if w not in keep]
    dying = set(draw(st.lists(st.sampled_from(mortal), max_size=2))) if mortal else set()
    done, busy, holders = [], {}, {}
    for key, until in (p.busy_until or {}).items():
        if until > now and Worker.parse(key) not in dying:
            busy[key] = until - now
    for op in plan.ops:
        if op.kind == "O" or op.start >= now:
            continue
        if op.end > now:
            if op.worker in dying:
                continue
            busy[f"{op.worker.pipeline},{op.worker.stage}"] = op.end - now
        lives = op.worker not in dying
        delivered = lives or (op.end <= now and draw(st.booleans()))
        done.append((op, delivered))
        step = 1 if op.kind == "F" else -1
        if op.kind != "W" and delivered and 0 <= op.stage + step < p.stages:
            tensor = ("F" if op.kind == "F" else "B", op.microbatch, op.stage)
            others = [w for w in p.workers() if w.stage == op.stage + step and w not in dying]
            holders[tensor] = {op.worker} if lives else {draw(st.sampled_from(others))}
    entries = [
        {"op": o.kind, "microbatch": list(o.microbatch), "stage": o.stage, "worker": list(o.worker), "delivered": d}
        for o, d in done
    ]
    # If an op was repeated, only its newest worker counts.
    moved = {(o.microbatch, o.stage): o.worker for o, _ in done}
    for e in p.done or ():
        if moved.get((e.microbatch, e.stage), e.worker) == e.worker:
            delivered = e.delivered and (e.worker not in dying or draw(st.booleans()))
            entries.append({**e._asdict(), "microbatch": list(e.microbatch), "worker": list(e.worker)})
            entries[-1]["delivered"] = delivered
            step = 1 if e.op == "F" else -1
            if e.op != "W" and delivered and 0 <= e.stage + step < p.stages:
                others = [w for w in p.workers() if w.stage == e.stage + step and w not in dying]
                lives = e.worker not in {*p.dead, *dying}
                tensor = ("F" if e.op == "F" else "B", e.microbatch, e.stage)
                holders[tensor] = {e.worker} if lives else {draw(st.sampled_from(others))}
    left = p.replace(failed=[*p.dead, *dying], done=entries, busy_until=busy)
    return left, holders
