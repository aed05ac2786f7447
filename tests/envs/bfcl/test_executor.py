"""Calls: nothing is evaluated, nothing hangs, nothing leaks from one episode into another."""

import decimal
import sys
from concurrent.futures import ThreadPoolExecutor

import mpmath
import pytest

from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.guards import MAX_CHARS, MAX_ENTRIES
from trace_gym.envs.bfcl.tasks import load_tasks

FILES = "multi_turn_base_0"  # TwitterAPI and GorillaFileSystem
TRAVEL = "multi_turn_long_context_154"
MATH = next(task.id for task in load_tasks("base").tasks() if "MathAPI" in task.involved_classes)


def fresh(task_id):
    return Instances.fresh(load_tasks().get(task_id))


def of(class_name, subset="base"):
    """Return the simulators of the first task that involves a class."""
    return Instances.fresh(next(t for t in load_tasks(subset).tasks() if class_name in t.involved_classes))


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """An expression that leaves a file behind if anything evaluates it."""
    trace = tmp_path_factory.mktemp("evil") / "trace"
    yield f"__import__('pathlib').Path({str(trace)!r}).touch()"
    assert not trace.exists(), "an attack was executed"


NAMES = ["__import__", "eval", "exec", "os.system", "(exit)", "_load_scenario", "__init__", "_generate_id", "exit", ""]


@pytest.mark.parametrize("name", NAMES)
def test_only_public_functions_of_the_involved_classes_have_names(name):
    """Whatever else is called does not exist, and the state stays as it is."""
    instances = fresh(FILES)
    before = instances.digest()
    assert instances.call(name, {"scenario": {}}) == f"Error during execution: name '{name}' is not defined"
    assert instances.call("book_flight", {}) == "Error during execution: name 'book_flight' is not defined"
    assert instances.digest() == before


def test_the_attacks_on_upstream_do_nothing(evil):
    """Code as a call, as an argument, as the name of a function or of an argument."""
    instances = fresh(FILES)
    before = instances.digest()
    texts = [evil, f"ls(a={evil})", f"ls(a=1+{evil})", f"[{evil}]", "(exit)()", "ls(a=exit(3))", f"(lambda: {evil})()"]
    texts += [
        "ls.__globals__['os']",
        "ls(*[1])",
        "ls(**{'a': 1})",
        f"ls(a=[x for x in [{evil}]])",
        f"ls(a=f'{{{evil}}}')",
    ]
    texts += [
        "open('x','w').write('y')",
        "GorillaFileSystem.ls()",
        "ls(); " + evil,
        "ls(a=" + "(" * 9_000,
        "ls(" * 5_000,
    ]
    texts += [
        "ls(a=" + "-" * 9_000 + "1)",
        "ls(a=" + "9" * 19_000 + ")",
        "x" * (MAX_CHARS + 1),
        "\x00",
        "ls(a='\ud800')",
    ]
    calls = [
        (evil, {}),
        ("ls", {evil: 1}),
        ("ls", {f"a=bool({evil}) or dict(z": 1}),
        ("ls", {"self": 1}),
        ("ls", {"": 1}),
    ]
    for text in texts:
        said = instances.call_text(text)
        assert said.startswith("Error during execution: ") or "current_directory_content" in said, text
    for name, arguments in calls:
        assert instances.call(name, arguments).startswith("Error during execution: ")
    assert instances.digest() == before


def test_a_wrong_call_gets_the_text_that_python_gives_it():
    """Upstream's text for a wrong argument names the class and the method."""
    instances = fresh(FILES)
    wrong = "Error during execution: GorillaFileSystem.ls() got an unexpected keyword argument 'x'"
    assert instances.call("ls", {"x": 1}) == wrong
    missing = "Error during execution: GorillaFileSystem.cd() missing 1 required positional argument: 'folder'"
    assert instances.call("cd", {}) == missing


def test_arguments_are_bounded_and_copied():
    """JSON values of at most 20,000 characters, nested at most 64 deep; what is changed later is the caller's own."""
    instances = of("TwitterAPI")
    deep = []
    for _ in range(100):
        deep = [deep]
    for value in (
        "x" * (MAX_CHARS + 1),
        ["x"] * (MAX_CHARS + 1),
        deep,
        1 << 80_000,
        {1},
        b"x",
        1j,
        ...,
        {1: 2},
        object(),
    ):
        assert "Error during execution: " in instances.call("authenticate_twitter", {"username": value, "password": ""})
    tags = ["#one"]
    instances.by_class["TwitterAPI"].authenticated = True
    instances.call("post_tweet", {"content": "x", "tags": tags, "mentions": tags})
    before = instances.digest()
    tags.append("#two")
    assert instances.digest() == before


HEAVY = [
    ("power", {"base": 9, "exponent": 9_999_999}),
    ("power", {"base": 99_999, "exponent": 99_999_999}),
    ("power", {"base": 10**4_000, "exponent": 1_000}),
    ("square_root", {"number": 2, "precision": 2_000_000}),
    ("logarithm", {"value": 2, "base": 10, "precision": 3e6}),
    ("logarithm", {"value": 2, "base": 10, "precision": "3000000"}),
    ("round_number", {"number": 5, "decimal_places": -(10**9)}),
]


@pytest.mark.parametrize(("name", "arguments"), HEAVY)
def test_a_calculation_without_bound_is_not_begun(name, arguments):
    """Seconds to minutes inside of C, where no signal gets through."""
    said = fresh(MATH).call(name, arguments)
    assert said.startswith("Error during execution: ") and (
        "at most" in said or "between" in said or "more than" in said
    )


def test_reasonable_calculations_are_made():
    """The bounds are far from what tasks need."""
    instances = fresh(MATH)
    assert instances.call("power", {"base": 2, "exponent": 100}) == f'{{"result": {2**100}}}'
    assert instances.call("logarithm", {"value": 100, "base": 10, "precision": 50}) == "{'result': mpf('2.0')}"
    assert "1.4142135623730950488" in instances.call("square_root", {"number": 2, "precision": 900})
    assert instances.call("round_number", {"number": 3.14159, "decimal_places": 2}) == '{"result": 3.14}'


def test_directories_that_share_their_contents_are_not_walked_for_ever():
    """Four calls double the number of paths; thirty times that would take years to list."""
    instances = fresh(FILES)
    for level in range(30):
        for text in (f"mkdir('n{level}')", f"cp('d{level}','e')", f"mv('d{level}','n{level}')", f"mv('e','n{level}')"):
            instances.call_text(text if level else text.replace("d0", "document"))
        instances.call_text(f"mv('n{level}','d{level + 1}')")
    for text in ("du()", "find()", "find(path='/')"):
        assert "more than 50000 paths" in instances.call_text(text)
    assert Instances.loads(instances.dumps()).digest() == instances.digest()


def test_copies_of_copies_stop_at_a_bound():
    """Each copy of a directory can copy all entries of it."""
    instances = fresh(FILES)
    contents = instances.by_class["GorillaFileSystem"].root.contents["document"].contents
    contents.update({f"f{number}": contents["final_report.pdf"] for number in range(MAX_ENTRIES // 4)})
    assert "copied" in instances.call_text("cp('document','one')")
    assert "copied" in instances.call_text("cp('document','two')")
    assert "at most 20000 entries" in instances.call_text("cp('document','three')")


def test_a_directory_in_itself_gives_upstreams_error():
    """Walking it ends with Python's bound, as upstream; listing it works."""
    instances = fresh(FILES)
    assert "copied" in instances.call_text("cp('document','document')")
    assert "maximum recursion depth exceeded" in instances.call_text("du()")
    assert "maximum recursion depth exceeded" in instances.call_text("find()")
    assert "document" in instances.call_text("ls()")


def test_default_arguments_are_those_of_a_new_process():
    """A mention changed the default of every later tweet of the process, upstream."""

    def post(instances):
        instances.by_class["TwitterAPI"].authenticated = True
        return instances.call("post_tweet", {"content": "x"})

    first = of("TwitterAPI")
    text = post(first)
    number = first.by_class["TwitterAPI"].tweet_counter - 1
    assert "successfully" in first.call("mention", {"tweet_id": number, "mentioned_usernames": ["@leak"]})
    assert post(of("TwitterAPI")) == text
    assert "@leak" not in post(first)


def test_a_booking_changes_the_card_of_its_own_episode_only():
    """Upstream's long context gives all instances one and the same credit card."""

    def cards(instances):
        return instances.by_class["TravelAPI"].credit_card_list

    first, second = fresh(TRAVEL), fresh(TRAVEL)
    shared = [number for number, card in cards(first).items() if card.get("balance")]
    for number in shared:
        cards(first)[number]["balance"] = -1
    assert all(cards(second)[number]["balance"] != -1 for number in shared) and shared
    assert all(cards(fresh(TRAVEL))[number]["balance"] != -1 for number in shared)


def test_calculating_leaves_the_precision_of_the_process_alone():
    """Upstream sets the precision of everybody's decimals and of mpmath."""
    before = decimal.getcontext().prec, mpmath.mp.dps
    instances = fresh(MATH)
    instances.call("square_root", {"number": 2, "precision": 3})
    instances.call("logarithm", {"value": 2, "base": 10, "precision": 3})
    assert (decimal.getcontext().prec, mpmath.mp.dps) == before
    with decimal.localcontext(prec=2, rounding=decimal.ROUND_UP):
        assert "1.4142135624" in instances.call("square_root", {"number": 2, "precision": 11})


def test_the_text_of_a_set_is_in_alphabetical_order():
    """Upstream's order changes with the seed of Python's hashes, which no replay could reproduce."""
    ticket = of("TicketAPI")
    ticket.by_class["TicketAPI"].current_user = "me"
    assert "created" in ticket.call("create_ticket", {"title": "x"}) or "id" in ticket.call(
        "create_ticket", {"title": "x"}
    )
    number = ticket.by_class["TicketAPI"].ticket_queue[-1]["id"]
    said = ticket.call("edit_ticket", {"ticket_id": number, "updates": dict.fromkeys("zyxabc, d", 1)})
    assert said == '{"error": "Invalid fields for update:  , ,, a, b, c, d, x, y, z"}'
    travel = Instances.fresh(load_tasks().get("multi_turn_base_154"))
    api = travel.by_class["TravelAPI"]
    api.token_expires_in, api.access_token = 100, "t"
    card, airports = next(iter(api.credit_card_list)), ("SFO", "LAX")
    arguments = dict(zip(("travel_from", "travel_to"), airports, strict=True), travel_date="2026-10-10", card_id=card)
    said = travel.call("book_flight", {**arguments, "access_token": "t", "travel_class": "wooden"})
    assert "Must be one of {'business', 'economy', 'first'}" in said


def test_whole_numbers_and_floats_mean_the_same():
    """The regression of a well-known complaint: 65 against 65.0."""
    said = []
    for speed in (65, 65.0):
        instances = of("VehicleControlAPI")
        instances.by_class["VehicleControlAPI"].engine_state = "running"
        instances.call("setCruiseControl", {"speed": speed, "activate": True, "distanceToNextVehicle": 100})
        said.append(instances.by_class["VehicleControlAPI"].cruiseStatus)
    assert said == ["active", "active"]


@pytest.mark.slow
def test_eight_threads_on_the_same_task_get_what_one_gets():
    """Twenty scenarios in their four variants, with threads that change hands often."""

    def play(task):
        instances = Instances.fresh(task)
        texts = [instances.call_text(call) for calls in task.ground_truth for call in calls]
        return texts, instances.dumps()

    tasks = [task for task in load_tasks().tasks() if task.base_id % 10 == 7]
    alone = [play(task) for task in tasks]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(8) as pool:
            for task, expected in zip(tasks, alone, strict=True):
                for texts, blob in pool.map(play, [task] * 8):
                    assert texts == expected[0], task.id
                    assert (
                        blob == expected[1] or Instances.loads(blob).digest() == Instances.loads(expected[1]).digest()
                    )
    finally:
        sys.setswitchinterval(interval)
