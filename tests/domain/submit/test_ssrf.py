"""Which addresses, names and ports a fetch may reach (docs/engines.md, Targets)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conveyor.domain.submit.target import (
    Target,
    TargetPolicy,
    forbidden_address,
    forbidden_host,
    forbidden_metadata_address,
    parse_url,
)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "0.1.2.3",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "0:0:0:0:0:ffff:a9fe:a9fe",
        "::127.0.0.1",
        "::a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "2001:0:a9fe:a9fe::",
        "169.254.169.254",
        "169.254.170.2",
        "169.254.1.1",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.0.1",
        "100.64.0.1",
        "192.0.0.1",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "240.0.0.1",
        "255.255.255.255",
        "224.0.0.1",
        "239.255.255.250",
        "ff02::1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "fec0::1",
        "100::1",
        "2001:db8::1",
        "3ffe::1",
        "3fff::1",
        "5f00::1",
        "100:0:0:1::1",
        "1fff:ffff::1",
        "4000::1",
        "6000::1",
        "fe00::1",
        "::ffff:0:808:808",
        "64:ff9b::808:808",
        "::5efe:808:808",
        "not an address",
        "",
        "0177.0.0.1",
    ],
)
def test_an_address_that_is_not_clearly_public_is_forbidden(address: str) -> None:
    assert forbidden_address(address) is not None
    assert TargetPolicy().forbids_address(address) is not None


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "::ffff:8.8.8.8", "2606:4700::1111", "2001:4860:4860::8888"],
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert forbidden_address(address) is None


def nat64(prefix: int, length: int, number: int) -> int:
    """An IPv4 address behind a prefix, placed around bits 64 to 71 as RFC 6052 requires."""
    if length == 96:
        return prefix << 32 | number
    high_bits = min(32, 64 - length)
    high, low = number >> (32 - high_bits), number & ((1 << (32 - high_bits)) - 1)
    after = low << (56 - (32 - high_bits))
    return prefix << (128 - length) | high << (64 - length - high_bits + 64) | after


# Each function takes an IPv4 address as a number and returns the number of an IPv6 address that
# contains it.
WRAPPERS: dict[str, Callable[[int], int]] = {
    "mapped": lambda number: 0xFFFF << 32 | number,
    "v4-compatible": lambda number: number,
    "v4-translated": lambda number: 0xFFFF << 48 | number,
    "NAT64": lambda number: 0x64FF9B << 96 | number,
    "local NAT64 /96": lambda number: nat64(0x64FF9B0001 << 48 | 7, 96, number),
    "local NAT64 /64": lambda number: nat64(0x64FF9B0001 << 16 | 7, 64, number),
    "local NAT64 /56": lambda number: nat64(0x64FF9B0001 << 8 | 7, 56, number),
    "local NAT64 /48": lambda number: nat64(0x64FF9B0001, 48, number),
    "6to4": lambda number: 0x2002 << 112 | number << 80 | 1,
    "Teredo server": lambda number: 0x20010000 << 96 | number << 64 | 0xF7F7F7F7,
    "Teredo client": lambda number: 0x20010000 << 96 | 0x8080808 << 64 | number ^ 0xFFFFFFFF,
    "ISATAP": lambda number: 0x2A01 << 112 | 0x00005EFE << 32 | number,
    "ISATAP, universal": lambda number: 0x2A01 << 112 | 0x02005EFE << 32 | number,
    "ISATAP, group": lambda number: 0x2A01 << 112 | 0x01005EFE << 32 | number,
    "ISATAP, both": lambda number: 0x2A01 << 112 | 0x03005EFE << 32 | number,
    "ISATAP, link-local": lambda number: 0xFE80 << 112 | 0x00005EFE << 32 | number,
}
PREFIXES = st.integers(0, 2**96 - 1)


@pytest.mark.parametrize("form", WRAPPERS)
@given(address=st.ip_addresses(v=4))
@settings(max_examples=30)
def test_an_ipv6_address_that_contains_a_forbidden_ipv4_address_is_forbidden(
    form: str, address: ipaddress.IPv4Address
) -> None:
    wrapped = ipaddress.IPv6Address(WRAPPERS[form](int(address)))

    if forbidden_address(address) is not None:
        assert forbidden_address(wrapped) is not None
        assert forbidden_address(str(wrapped)) is not None
    if forbidden_metadata_address(address) is not None:
        assert forbidden_metadata_address(wrapped) is not None
    if form == "mapped":
        assert forbidden_address(wrapped) == forbidden_address(address)


@pytest.mark.parametrize("form", WRAPPERS)
@pytest.mark.parametrize("service", ["169.254.169.254", "169.254.170.2", "100.100.100.200"])
@pytest.mark.parametrize("policy", [TargetPolicy(), TargetPolicy(allow_private=True)])
def test_a_metadata_service_inside_an_ipv6_address_is_refused_in_both_modes(
    form: str, service: str, policy: TargetPolicy
) -> None:
    wrapped = ipaddress.IPv6Address(WRAPPERS[form](int(ipaddress.IPv4Address(service))))

    assert policy.forbids_address(str(wrapped)) == "the target is a metadata service"
    assert policy.forbids_target(site(f"http://[{wrapped}]/")) is not None


@pytest.mark.parametrize("form", WRAPPERS)
def test_a_multicast_address_inside_an_ipv6_address_is_refused_where_private_is_allowed(
    form: str,
) -> None:
    wrapped = ipaddress.IPv6Address(WRAPPERS[form](int(ipaddress.IPv4Address("239.1.2.3"))))

    assert TargetPolicy(allow_private=True).forbids_address(str(wrapped)) is not None


@pytest.mark.parametrize("length", [32, 40, 48, 56, 64, 96])
@given(prefix=PREFIXES)
@settings(max_examples=20)
def test_a_metadata_service_behind_any_translation_prefix_is_refused_in_both_modes(
    length: int, prefix: int
) -> None:
    service = int(ipaddress.IPv4Address("169.254.169.254"))
    wrapped = str(ipaddress.IPv6Address(nat64(prefix >> (96 - length), length, service)))

    assert forbidden_address(wrapped) is not None
    assert forbidden_metadata_address(wrapped) is not None


@given(st.ip_addresses(v=6))
def test_an_allowed_ipv6_address_is_in_the_public_range(ip: ipaddress.IPv6Address) -> None:
    assume(ip.ipv4_mapped is None)

    if ip not in ipaddress.ip_network("2000::/3"):
        assert forbidden_address(ip) is not None
    elif forbidden_address(ip) is None:
        assert ip.is_global


@pytest.mark.parametrize("service", ["fd00:ec2::254", "fe80::a9fe:a9fe", "::ffff:169.254.169.254"])
def test_a_zone_id_does_not_hide_a_metadata_service(service: str) -> None:
    assert forbidden_metadata_address(f"{service}%eth0") == "a metadata service"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.",
        "LOCALHOST",
        "foo.localhost",
        "localhost.localdomain",
        "metadata",
        "metadata.google.internal",
        "db.prod.internal",
        "printer.local",
        "api.default.svc.cluster.local",
        "router.lan",
        "x.home.arpa",
        "intranet",
        "127.0.0.1",
        "::1",
    ],
)
def test_a_name_of_an_internal_network_is_forbidden(host: str) -> None:
    assert forbidden_host(host) is not None


@pytest.mark.parametrize("host", ["example.com", "localhost.example.com", "internal.io", "8.8.8.8"])
def test_a_public_name_is_allowed(host: str) -> None:
    assert forbidden_host(host) is None


def site(url: str) -> Target:
    target = parse_url(url)
    assert isinstance(target, Target)
    return target


@pytest.mark.parametrize("port", [22, 25, 6379, 8080, 11211])
def test_only_web_ports_and_configured_ports_are_allowed(port: int) -> None:
    target = site(f"http://example.com:{port}/")

    assert TargetPolicy().forbids_target(target) is not None
    assert TargetPolicy(extra_ports=frozenset({port})).forbids_target(target) is None
    assert TargetPolicy(allow_private=True).forbids_target(target) is None


def test_both_web_ports_are_allowed_with_both_schemes() -> None:
    assert TargetPolicy().forbids_target(site("http://example.com:443/")) is None
    assert TargetPolicy().forbids_target(site("https://example.com/")) is None


def test_host_names_of_the_service_itself_can_be_denied() -> None:
    policy = TargetPolicy(denied_hosts=frozenset({"api.conveyor.example"}), allow_private=True)

    assert policy.forbids_target(site("https://api.conveyor.example/v1/jobs")) is not None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::1", "fd12::1"])
def test_private_addresses_can_be_fetched_where_they_are_allowed(address: str) -> None:
    assert TargetPolicy(allow_private=True).forbids_address(address) is None


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "::ffff:a9fe:a9fe", "fd00:ec2::254", "168.63.129.16", "224.0.0.1"],
)
def test_metadata_and_multicast_stay_forbidden_where_private_is_allowed(address: str) -> None:
    assert TargetPolicy(allow_private=True).forbids_address(address) is not None
