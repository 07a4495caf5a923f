"""Which addresses, names and ports a fetch may reach (SPEC 8.2)."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.addresses import TargetPolicy, forbidden_address, forbidden_host
from conveyor.domain.urls import Target, parse_url


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
        "3fff::1",
        "5f00::1",
        "not an address",
        "",
        "0177.0.0.1",
    ],
)
def test_an_address_that_is_not_plainly_public_is_forbidden(address: str) -> None:
    assert forbidden_address(address) is not None
    assert TargetPolicy().forbids_address(address) is not None


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "::ffff:8.8.8.8", "2606:4700::1111", "2001:4860:4860::8888"],
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert forbidden_address(address) is None


@given(st.ip_addresses(v=4))
def test_a_wrapped_address_is_never_more_allowed_than_the_bare_one(
    address: ipaddress.IPv4Address,
) -> None:
    number = int(address)
    wrapped = ipaddress.IPv6Address((0xFFFF << 32) | number)
    compatible = ipaddress.IPv6Address(number)
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | number)

    assert forbidden_address(wrapped) == forbidden_address(address)
    assert forbidden_address(compatible) is not None
    assert forbidden_address(nat64) is not None


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
def test_only_web_ports_and_configured_ones_are_open(port: int) -> None:
    target = site(f"http://example.com:{port}/")

    assert TargetPolicy().forbids_target(target) is not None
    assert TargetPolicy(extra_ports=frozenset({port})).forbids_target(target) is None
    assert TargetPolicy(allow_private=True).forbids_target(target) is None


def test_either_web_port_is_open_to_either_scheme() -> None:
    assert TargetPolicy().forbids_target(site("http://example.com:443/")) is None
    assert TargetPolicy().forbids_target(site("https://example.com/")) is None


def test_our_own_host_names_may_be_denied() -> None:
    policy = TargetPolicy(denied_hosts=frozenset({"api.conveyor.example"}), allow_private=True)

    assert policy.forbids_target(site("https://api.conveyor.example/v1/jobs")) is not None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::1", "fd12::1"])
def test_private_addresses_open_where_they_are_allowed(address: str) -> None:
    assert TargetPolicy(allow_private=True).forbids_address(address) is None


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "::ffff:a9fe:a9fe", "fd00:ec2::254", "168.63.129.16", "224.0.0.1"],
)
def test_metadata_and_multicast_stay_forbidden_where_private_is_allowed(address: str) -> None:
    assert TargetPolicy(allow_private=True).forbids_address(address) is not None
