"""Who a peer is: from the recipe, the environment, a bundle; and what is refused with one message."""

from __future__ import annotations

import http.client
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from tests.diloco.elastic_peers import until
from tests.diloco.served_states import write_checkpoint

from bloomery.agent.admission import fingerprint
from bloomery.agent.assemble import access_of, assemble_agent, codec_warning, round_settings
from bloomery.agent.state_serving import PeerStateServer
from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.config.peer_settings import equal_settings
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.errors import ConfigError, CoordinatorError, PeerError
from bloomery.events.run_directory import RunDirectory
from bloomery.state_transfer.served_states import ServedStates
from bloomery.transport.sockets import RateLimiter
from bloomery.transport.trust import Trust

COORDINATOR = {"BLOOMERY_COORDINATOR": "http://127.0.0.1:2379, http://127.0.0.1:2381"}


def access(*overrides, environment=None, **more):
    loaded = load_recipe("demo", ("elastic.inner_steps=50", *overrides))
    return access_of(loaded.recipe, loaded.sources, COORDINATOR | (environment or {}) | more)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificates")
    init_certificates(directory, run="demo", peers=["alice", "bob"])
    return directory / "demo"


def test_a_peer_is_what_the_environment_says_where_the_recipe_is_silent():
    found = access(environment={"BLOOMERY_PEER": "carol", "BLOOMERY_LISTEN": "127.0.0.1:0,[::1]:0"})
    assert (found.run, found.peer, found.listen) == ("demo", "carol", ("127.0.0.1:0", "[::1]:0"))
    assert found.endpoints == ("http://127.0.0.1:2379", "http://127.0.0.1:2381")
    assert access("elastic.peer=dave", environment={"BLOOMERY_PEER": "carol"}).peer == "dave"


def test_with_a_bundle_a_peer_has_its_name_and_may_listen_everywhere(bundles):
    found = access(
        f"elastic.certificates={bundles / 'alice'}",
        "elastic.listen=[::]:29600",
        "elastic.advertise=alice.example.org:29600",
    )
    assert found.peer == "alice" and found.advertise == ("alice.example.org:29600",)
    assert found.bundle is not None and found.bundle.access().context is not None


def test_a_bundle_of_another_peer_or_run_is_refused(bundles):
    with pytest.raises(PeerError, match="belong to peer 'alice'") as refused:
        access(f"elastic.certificates={bundles / 'alice'}", "elastic.peer=bob")
    assert "elastic.certificates" in refused.value.remedy and "elastic.peer" in refused.value.remedy
    with pytest.raises(PeerError, match="of the run 'demo'"):
        access(f"elastic.certificates={bundles / 'alice'}", "run.name=other")
    with pytest.raises(CoordinatorError, match="cannot be used"):
        access(f"elastic.certificates={bundles / 'nobody'}")


@pytest.mark.parametrize(
    "setting", ["elastic.listen=0.0.0.0:29600", "elastic.listen=[::]:0", "elastic.advertise=example.org:1"]
)
def test_without_certificates_nothing_leaves_the_machine(setting):
    with pytest.raises(PeerError, match="Without certificates") as refused:
        access(setting)
    assert "--init-certs" in refused.value.remedy


@pytest.mark.parametrize(
    "settings",
    [
        ("elastic.listen=[::]:29600",),
        ("elastic.listen=:29600",),
        ("elastic.listen=[::0]:29600",),
        ("elastic.listen=10.0.0.2:29600", "elastic.advertise=0.0.0.0:29600"),
        (
            "elastic.listen=0.0.0.0:29600",
            "elastic.advertise=127.0.0.1:29600",
            "elastic.coordinator=https://10.0.0.1:2379",
        ),
    ],
)
def test_who_listens_everywhere_says_where_it_can_be_dialled(bundles, settings):
    with pytest.raises(PeerError, match="where it can be dialled") as refused:
        access(f"elastic.certificates={bundles / 'alice'}", *settings)
    assert "elastic.advertise" in refused.value.remedy and "BLOOMERY_ADVERTISE" in refused.value.remedy


def test_encryption_wants_certificates():
    with pytest.raises(PeerError, match="needs certificates") as refused:
        access("elastic.encrypt=tls")
    assert "--init-certs" in refused.value.remedy and "elastic.certificates" in refused.value.remedy


def test_every_mistake_is_told_at_once():
    loaded = load_recipe("demo", ("elastic.peer=a/b", "elastic.inner_steps=0"))
    with pytest.raises(ConfigError) as refused:
        access_of(loaded.recipe, loaded.sources, {})
    keys = {mistake.key for mistake in refused.value.mistakes}
    assert keys == {"elastic.peer", "elastic.inner_steps", "elastic.coordinator"}
    helps = {mistake.key: mistake.remedy for mistake in refused.value.mistakes}
    assert "`bloomery coordinate`" in helps["elastic.coordinator"]
    assert "BLOOMERY_COORDINATOR" in helps["elastic.coordinator"] and "63 letters" in helps["elastic.peer"]


def test_an_address_that_is_none_is_refused():
    with pytest.raises(PeerError, match="is not an address"):
        access("elastic.listen=somewhere")


def test_an_endpoint_that_is_no_url_is_refused_as_any_other_that_is_none():
    with pytest.raises(CoordinatorError, match="is not the endpoint of a coordinator"):
        access("elastic.coordinator=http://[::1:2379").etcd()


def test_the_fingerprint_is_of_what_peers_must_share():
    def of(*overrides):
        return fingerprint(equal_settings(load_recipe("demo", overrides).recipe))

    assert of() == of("elastic.peer=a", "elastic.grace_s=5", "run.name=other", "log.every_steps=3")
    for shared in ("model.layers=3", "elastic.codec=int4", "elastic.outer_momentum=0.5"):
        assert of(shared) != of(), shared


def test_a_peer_warns_of_what_quantising_costs_among_so_many():
    assert codec_warning(ElasticSection(codec="int8", peers=64)) == ""
    assert codec_warning(ElasticSection(codec="int4", peers=64)) == (
        "int4 among 64 peers loses 12.4% of each average; partial sums are sent as int8, or it were more"
    )
    assert "int8 among 128 peers loses 1.5%" in codec_warning(ElasticSection(codec="int8", peers=128))


def test_round_settings_follow_the_recipe():
    recipe = load_recipe(
        "demo",
        (
            "elastic.inner_steps=50",
            "elastic.join=overlapped",
            "elastic.grace_s=7",
            "train.tokens=0",
            "train.samples=900",
        ),
    ).recipe
    settings = round_settings(recipe)
    assert (settings.inner_steps, settings.total_samples) == (50, 900)
    assert settings.joins_within and settings.grace_s == 7.0
    assert settings.limits == OfferLimits(
        tokens_per_sample=recipe.data.sequence_length, steps=50, batch=recipe.train.global_batch
    )


def test_a_parent_is_put_together_and_taken_apart(coordinator, tmp_path):
    loaded = load_recipe("demo", ("elastic.inner_steps=50", "elastic.peer=a"))
    found = access_of(loaded.recipe, loaded.sources, {"BLOOMERY_COORDINATOR": coordinator.endpoint})
    before = set(threading.enumerate())
    with ExitStack() as stack:
        parent = assemble_agent(loaded.recipe, found, RunDirectory(tmp_path / "run"), stack)
        parent.open()
        assert parent.path.is_socket()
        parent.ranks_ended(failed=False)
        assert not parent.run().failed
    assert not parent.path.exists()
    until(lambda: set(threading.enumerate()) <= before)


def test_a_loopback_address_is_told_to_nobody_where_the_coordinator_is_elsewhere(bundles, caplog):
    certificates, far = (
        f"elastic.certificates={bundles / 'alice'}",
        "elastic.coordinator=https://10.0.0.1:2379",
    )
    assert access(certificates).listen == ("127.0.0.1:0",)  # all on this machine
    assert access(certificates, far).listen == ()
    both = access(certificates, far, "elastic.listen=127.0.0.1:29600,10.0.0.2:29600")
    assert both.listen == ("10.0.0.2:29600",)
    assert (
        "other machines cannot reach 127.0.0.1:29600, 10.0.0.2:29600; this peer advertises 10.0.0.2"
        in caplog.text
    )
    caplog.clear()
    access(certificates, far, "elastic.listen=10.0.0.2:29600")
    assert not caplog.text
    assert access(certificates, far, "elastic.advertise=localhost:1,a.example:2").advertise == (
        "a.example:2",
    )


def test_a_loopback_address_that_another_machine_tells_is_not_dialled(bundles):
    certificates = f"elastic.certificates={bundles / 'alice'}"
    here, far = access(certificates), access(certificates, "elastic.coordinator=https://10.0.0.1:2379")
    with closing(far.etcd()) as etcd:
        assert here.trust(etcd).dials_loopback and not far.trust(etcd).dials_loopback


@pytest.mark.parametrize("setting", ["elastic.listen=none", "elastic.coordinator=https://10.0.0.1:2379"])
def test_a_peer_that_nobody_can_dial_is_no_relay(bundles, setting):
    with pytest.raises(PeerError, match="this one only dials") as refused:
        access(f"elastic.certificates={bundles / 'alice'}", "elastic.relay=true", setting)
    assert "elastic.listen" in refused.value.remedy and "elastic.relay = false" in refused.value.remedy


def test_a_peer_that_only_dials_listens_nowhere_and_serves_nothing(bundles):
    found = access(f"elastic.certificates={bundles / 'alice'}", "elastic.listen=none")
    assert found.listen == ()
    served = PeerStateServer(found, Trust(token=b"t"), ServedStates(), rate_limiter=RateLimiter(0.0))
    assert not served.urls
    served.close()


def test_a_state_is_served_on_every_listening_address(tmp_path):
    write_checkpoint(tmp_path, {"model": b"weights"}, step=0)
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    found = access("elastic.listen=127.0.0.1:0,127.0.0.2:0")
    states = ServedStates()
    served = PeerStateServer(found, Trust(token=b"t"), states, rate_limiter=RateLimiter(1e6))
    try:
        served.offer(directory, round=1, digest="ab12")
        urls = served.urls
        assert [urlsplit(url).hostname for url in urls] == ["127.0.0.1", "127.0.0.2"]
        for url in urls:
            place = urlsplit(url)
            connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60.0)
            connection.request("GET", "/state/ab12", headers={"Authorization": f"Bearer {b't'.hex()}"})
            assert connection.getresponse().status == 200
            connection.close()
    finally:
        served.close()
        states.clear()


def test_each_setting_of_rounds_is_that_of_the_recipe():
    recipe = load_recipe("demo", ("elastic.inner_steps=50",)).recipe
    section = replace(
        recipe.elastic,
        peers=11,
        minimum_peers=3,
        grace_s=41.0,
        patience_s=13.0,
        outlier_factor=17.0,
        quorum=2,
        overlap_steps=5,
        join="immediate",
    )
    made = round_settings(replace(recipe, elastic=section))
    assert (made.peers, made.minimum_peers, made.grace_s, made.patience_s) == (11, 3, 41.0, 13.0)
    assert (made.outlier_factor, made.quorum, made.overlap_steps, made.joins_within) == (17.0, 2, 5, False)
    assert (made.answer_s, made.stagger_s) == (0.7, 0.2)
    assert made.feedback_rounds == section.feedback_rounds
    sparse = replace(section, codec="sparse", feedback_decay=0.95)
    assert round_settings(replace(recipe, elastic=sparse)).feedback_rounds == sparse.feedback_rounds != 1.0
