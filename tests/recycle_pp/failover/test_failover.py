"""After any deaths, broken links and delays, at most one leader acts per term, and the job continues if it can.

The supervisors, their elections and the discovery after a take-over are the product's own classes, on a simulated clock
and network: 100,000 random orders with --full. A failure prints the `Order` that reproduces it:

    Simulation(Order(seed=8, ...)).run()
"""

import random
from itertools import combinations, permutations

import pytest

from .simulation import Fault, Order, Simulation

CHUNK = 400
QUICK, FULL = 1, 250
CUT_CHUNK = 40
# A killed process runs nothing any more, not even coroutines that it has just created.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def random_order(seed):
    """Deaths, resets, healed cuts, late messages and pauses, few enough that the job can usually continue."""
    chance = random.Random(seed)
    size, one_machine = chance.choice([3, 4, 5, 6]), chance.random() < 0.5
    names = [f"s{k}" for k in range(size)]
    # Deaths on one machine are proven, so a single survivor can continue.
    most = size - 1 if one_machine else (size - 1) // 2
    faults, at = [], 0.5
    victims = chance.sample(names, chance.randint(0, most))
    for name in victims:
        at += chance.choice([0.0, 0.1, 0.5, 2.0, 6.0]) * chance.random()
        faults.append(Fault(at, "kill", (name,)))
    faults += [Fault(chance.uniform(0, at + 5), "reset") for _ in range(chance.randint(0, 2))]
    if not one_machine and len(victims) < most and chance.random() < 0.5:
        left = [name for name in names if name not in victims]
        cut_at = chance.uniform(0, 5)
        faults.append(Fault(cut_at, "cut", tuple(chance.sample(left, chance.randint(1, most - len(victims))))))
        faults.append(Fault(cut_at + chance.choice([0.5, 3.0, 15.0, 40.0]) * chance.random(), "heal"))
    return Order(
        seed,
        size,
        one_machine,
        latest=chance.choice([0.0, 0.1, 1.0, 2.0]),
        pauses=chance.choice([0, 0, 3, 8]),
        hosting=chance.choice([0.0, 1.0, 2.0]),
        faults=tuple(faults),
    )


def one_way(seed, supervisors, links, heals=None, at=None):
    """A job whose directed links (from, to) are cut at `at` and healed `heals` seconds later, or never."""
    chance = random.Random(seed)
    at = chance.uniform(0.0, 5.0) if at is None else at
    faults = [Fault(at, "one_way", links=tuple((f"s{a}", f"s{b}") for a, b in links))]
    if heals is not None:
        faults.append(Fault(at + heals, "heal"))
    latest = chance.choice([0.0, 0.1, 1.0])
    return Order(
        seed, supervisors, one_machine=False, latest=latest, hosting=chance.choice([0.0, 1.0]), faults=tuple(faults)
    )


def random_cut(seed):
    """A cut of some of the 20 directed links of five supervisors, healed or not."""
    chance = random.Random(f"one way {seed}")
    links = list(permutations(range(5), 2))
    heals = chance.choice([None, None, 0.5, 5.0, 20.0, 60.0])
    heals = None if heals is None else heals * chance.uniform(0.3, 1.0)
    return one_way(seed, 5, chance.sample(links, chance.choice([1, 2, 3, 4, 5, 6, 8, 10, 14])), heals)


def run(order):
    with Simulation(order) as simulation:
        simulation.run()
    return simulation


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chunk", [n if n < QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(FULL)], ids=lambda n: f"{n}"
)
def test_in_any_order_of_deaths_cuts_and_delays_one_leader_acts_and_the_job_continues(chunk, capsys):
    lost = sum(run(random_order(seed)).lost for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK))
    assert lost < CHUNK / 10, "most orders must leave a majority"


LINKS = list(permutations(range(3), 2))
CUTS = [cut for size in range(1, 7) for cut in combinations(LINKS, size)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: " ".join(f"{a}>{b}" for a, b in cut))
def test_a_connected_majority_of_three_continues_after_any_one_way_cut(cut, seed):
    run(one_way(seed, 3, cut))
    run(one_way(seed, 3, cut, heals=random.Random(seed).uniform(0.5, 60.0)))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chunk", [n if n < QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(FULL)], ids=lambda n: f"{n}"
)
def test_a_connected_majority_of_five_continues_after_any_one_way_cut(chunk):
    for seed in range(chunk * CUT_CHUNK, (chunk + 1) * CUT_CHUNK):
        run(random_cut(seed))


def test_a_simulation_is_deterministic():
    first, again = (run(random_order(8)) for _ in range(2))
    assert first.history == again.history and len(first.history) > 5


def test_the_next_leader_may_die_during_its_election_or_while_it_starts_the_coordinator():
    for after in (0.0, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0):
        deaths = (Fault(1.0, "kill", ("s0",)), Fault(1.0 + after, "kill", ("s1",)))
        for one_machine in (False, True):
            simulation = run(Order(5, supervisors=6, one_machine=one_machine, latest=0.0, faults=deaths))
            assert not simulation.lost


def test_without_a_majority_and_without_proven_deaths_all_supervisors_stop():
    deaths = (Fault(1.0, "kill", ("s0", "s1")),)
    simulation = run(Order(1, supervisors=4, one_machine=False, latest=0.1, faults=deaths))
    assert [node.code for node in simulation.nodes[2:]] == [1, 1]


def test_on_one_machine_the_last_survivor_continues():
    deaths = tuple(Fault(1.0 + 3 * k, "kill", (f"s{k}",)) for k in range(5))
    simulation = run(Order(1, supervisors=6, one_machine=True, latest=0.1, faults=deaths))
    assert simulation.nodes[5].code is None and simulation.nodes[5].committed > 10


def test_a_paused_leader_is_replaced_and_follows_its_successor():
    """The pause is longer than the others wait. They elect another leader, and the old one follows it."""
    pauses = (Fault(1.0, "pause", ("s0",), seconds=25.0),)
    simulation = run(Order(3, supervisors=4, one_machine=False, latest=0.1, faults=pauses))
    terms = [line for line in simulation.history if "was elected" in line]
    assert len(terms) > 1 and simulation.nodes[0].code is None


def test_a_leader_left_out_of_the_newest_membership_may_lose_its_connection_to_itself():
    """A regression found among 100,000 random orders: this leader, elected by an older membership, could not be elected
    again."""
    lost = [Fault(2.689, "kill", ("s4",)), Fault(2.906, "kill", ("s0",)), Fault(3.037, "kill", ("s2",))]
    resets = [Fault(0.0805, "reset"), Fault(3.605, "reset")]
    assert not run(Order(34292, supervisors=5, pauses=8, hosting=0.0, faults=(*lost, *resets))).lost
