"""Which page begins next: turns, limits and pauses of hosts."""

from __future__ import annotations

from conveyor.cli.scrape.hosts import Host, Hosts, is_private_host


def hosts_for(*names: str, limit: int | None = None, interval_s: float = 0.0) -> Hosts:
    hosts = Hosts(names, lambda name: Host(name, limit, interval_s))
    for index in range(len(names)):
        hosts.add(index, 0.0)
    return hosts


def take_all(hosts: Hosts, now: float = 0.0) -> list[int]:
    found = []
    while (index := hosts.take(now)) is not None:
        found.append(index)
    return found


def test_hosts_take_turns() -> None:
    assert take_all(hosts_for("a", "a", "a", "b", "b")) == [0, 3, 1, 4, 2]


def test_a_full_host_waits_until_a_page_ends() -> None:
    hosts = hosts_for("a", "a", "a", limit=2)

    assert take_all(hosts) == [0, 1]
    hosts.end(0, 1.0)
    assert take_all(hosts, 1.0) == [2]


def test_pages_of_a_host_begin_at_its_rate() -> None:
    hosts = hosts_for("a", "a", "a", interval_s=0.5)

    assert take_all(hosts, 10.0) == [0]
    assert hosts.wake_at(10.0) == 10.5
    assert take_all(hosts, 10.5) == [1]
    hosts.end(0, 10.6)
    assert take_all(hosts, 10.9) == []
    assert take_all(hosts, 11.0) == [2]


def test_a_page_without_a_request_takes_no_turn_of_its_host() -> None:
    hosts = hosts_for("a", "a", "a", "a", interval_s=60.0)

    assert hosts.take(10.0) == 0
    hosts.put_back(0)
    hosts.unblock(hosts.host(0), 10.5)
    for index in range(2):
        assert hosts.take(10.5) == index
        hosts.forgo(index, 10.5)

    assert take_all(hosts, 10.5) == [2]
    assert take_all(hosts, 70.4) == []
    assert take_all(hosts, 70.5) == [3]


def test_a_host_that_asks_for_fewer_requests_is_paused_and_halved_and_recovers() -> None:
    hosts = hosts_for(*["a"] * 30, limit=8)
    first = take_all(hosts)
    host = hosts.host(0)

    assert hosts.throttle(host, 0.0, retry_after_s=7.0, is_explicit=True)
    for index in first:
        hosts.end(index, 0.0)

    assert (host.limit, take_all(hosts, 6.9)) == (4, [])
    assert len(take_all(hosts, 7.0)) == 4
    for _ in range(4):
        hosts.succeed(host, 0.1)
    assert host.limit == 5


def test_a_single_503_does_not_slow_a_host_down_but_a_row_of_them_does() -> None:
    hosts = hosts_for(*["a"] * 5)
    take_all(hosts)
    host = hosts.host(0)

    slowed = [hosts.throttle(host, 0.0, retry_after_s=None, is_explicit=False) for _ in range(3)]

    assert slowed == [False, False, True]
    assert host.limit == 2


def test_a_page_that_is_put_back_blocks_its_host_only() -> None:
    hosts = hosts_for("a", "b")
    index = hosts.take(0.0)
    assert index == 0

    hosts.put_back(index)

    assert take_all(hosts) == [1]
    hosts.unblock(hosts.host(0), 0.0)
    assert take_all(hosts) == [0]


def test_a_page_returns_when_its_time_has_come() -> None:
    hosts = hosts_for("a")
    assert take_all(hosts) == [0]
    hosts.end(0, 0.0)

    hosts.add_later(0, 3.0)

    assert (take_all(hosts, 2.9), hosts.wake_at(2.9), take_all(hosts, 3.0)) == ([], 3.0, [0])


def test_private_hosts_are_known_by_name_and_address() -> None:
    assert all(map(is_private_host, ["localhost", "127.0.0.1", "10.1.2.3", "::1", "a.localhost"]))
    assert not any(map(is_private_host, ["example.com", "8.8.8.8", "localhost.example.com"]))
