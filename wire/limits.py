"""Every limit, window, rate and deadline of the wire protocol, in one frozen value that is handed down.

Why one place.  A limit that lives next to its use is found by nobody: it cannot be lowered for a test, cannot be compared with
the limit that must be larger than it, and a stranger finds the one that was forgotten.  Here each has a reason beside it, and
the order in which they must nest is checked when the value is made.

Reading the names: `_bytes`, `_s`, `_per_s` are units; a `_burst` is the size of the token bucket whose rate stands before it.
Deadlines are ceilings for strangers; for a peer with history the caller passes `clamp(4 * (median + 4 * spread), 1 s, ceiling)`.

Test code shrinks single values with `dataclasses.replace(DEFAULT_LIMITS, record_rekey_records=16)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

RENEW_JITTER = 0.1  # of the renewal of signed records, so that a swarm that started in one tick does not renew in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one node.  Raises ValueError when two of them contradict each other."""

    # Hello and handshake
    hello_max_bytes: int = 512  # three short lists and a nonce; keeps the clear part in one segment
    hello_context_max_bytes: int = 32  # the punch nonce needs 16
    handshake_message_max_bytes: int = 4 * KIB  # message 2 needs ~250; room for appended items
    preauth_max_bytes: int = 16 * KIB  # all memory of a connection before authentication
    handshake_timeout_s: float = 10.0  # from accept or connect to HELLO: 3 RTT plus a SYN-like loss and repeat at 3 s

    # Records
    record_plaintext_max_bytes: int = 256 * KIB  # larger gains nothing, smaller costs 20-40 us of Python a record
    record_plaintext_min_bytes: int = 16 * KIB  # smallest scheduling quantum of a slow line
    record_plaintext_start_bytes: int = 64 * KIB  # until the rate is known
    record_quantum_s: float = 0.005  # the sender's record is this long at the lane's rate
    record_rekey_records: int = 1 << 20  # sender changes its key at either
    record_rekey_bytes: int = 64 * GIB
    record_refuse_records: int = 1 << 22  # receiver ends the connection at either: AES-GCM stays at ~2^-60
    record_refuse_bytes: int = 256 * GIB
    hello_frame_max_bytes: int = 8 * KIB
    hello_update_interval_s: float = 5.0
    hello_update_burst: int = 5

    # Messages
    message_max_bytes: int = 64 * KIB  # one record, so that nothing is ever reassembled
    message_depth_max: int = 8
    message_array_max: int = 1024
    open_meta_max_bytes: int = 4 * KIB
    protocol_name_max_bytes: int = 64
    detail_max_bytes: int = 128
    agent_max_bytes: int = 64
    features_max: int = 64

    # Flow control
    stream_window_control_bytes: int = 64 * KIB  # class 1
    stream_window_bulk_bytes: int = 4 * MIB  # classes 2-4: 336 Mbit/s at 100 ms
    stream_window_min_bytes: int = 64 * KIB  # HELLO may lower the bulk window to this
    stream_window_max_bytes: int = 32 * MIB  # 1 Gbit/s x 250 ms
    connection_window_control_bytes: int = 1 * MIB  # where the first connection of a pair starts
    connection_window_lane_bytes: int = 16 * MIB  # where one that carries bulk starts
    connection_window_guest_bytes: int = 256 * KIB
    connection_window_max_bytes: int = 64 * MIB
    unread_budget_bytes: int = 2 * GIB  # with 25 % of RAM, whichever is less
    credit_return_fraction: float = 0.25  # CREDIT is sent when this share of the window was read

    # Priorities
    control_share: float = 0.10  # classes 0 and 1 while others wait, of control_share_window_s
    control_share_window_s: float = 0.1
    class_weights: tuple[int, int, int] = (16, 4, 1)  # classes 2, 3, 4

    # Session
    inbound_streams_max: int = 256
    inbound_backlog_max: int = 64  # opened by the peer and not accepted yet
    opens_per_s: float = 200.0
    opens_burst: int = 400
    resets_per_s: float = 100.0
    resets_burst: int = 200
    pings_per_s: float = 20.0
    pings_burst: int = 100  # a burst of pings that the network held up for 30 s is 6; four such links over one relay fit easily
    credits_per_s: float = 200.0  # plus one per credits_free_bytes that we sent
    credits_burst: int = 400
    # A well-behaved reader returns credit for each quarter of a window, of the stream and of the connection: 5 per 64 KiB on the
    # smallest ones.  One per 64 KiB, the first plan, would cut a fast control stream on a local line (WIRE-11).
    credits_free_bytes: int = 8 * KIB
    replies_waiting_max: int = 1024
    pongs_waiting_max: int = 4
    draining_timeout_s: float = 30.0
    ping_interval_s: float = 5.0
    dead_after_s: float = 10.0  # or dead_after_rtts, whichever is longer, with two pings open
    dead_after_rtts: float = 8.0
    ping_open_max: int = 2
    quiet_ping_s: float = 2.0  # of silence while channels exist; or quiet_ping_rtts, whichever is longer
    quiet_ping_rtts: float = 4.0
    quiet_dead_s: float = 8.0  # of silence on a connection and all its lanes (timers.py); leaves 7 s of the 15 for dialling again
    rtt_samples: int = 64
    write_stalled_s: float = 30.0
    idle_connection_s: float = 300.0

    # Tensors
    tensor_max_bytes: int = 256 * MIB
    chunk_bytes: int = 256 * KIB  # one record
    slots_open_max: int = 64
    channel_messages_waiting_max: int = 1024  # for a peer that reads: at most a few for each of 64 slots
    channel_name_max_bytes: int = 64
    tensor_key_max_bytes: int = 64
    tensor_tags_max: int = 4
    delivered_keys_max: int = 65_536
    compress_ratio_min: float = 1.1  # Gaussian bf16 has 1.45; below this the gain is within what the rates sway
    compress_probe_tensors: int = 64  # the ratio is measured on one chunk of every so many tensors
    compress_link_max_bytes_per_s: float = 62.5e6  # 500 Mbit/s: above, cores are worth more than bytes

    # Addresses and dialling
    address_max_bytes: int = 256
    addresses_per_peer_max: int = 16
    capabilities_max: int = 32
    dials_per_target_per_s: float = 3.0  # to one target IP, so that records cannot aim the swarm at a victim
    dials_at_once_per_peer: int = 8
    dial_timeout_s: float = 5.0  # one attempt
    dial_stagger_s: float = 0.25  # RFC 8305
    dial_stagger_private_s: float = 0.03
    dial_stagger_circuit_s: float = 0.5  # a direct connection costs nobody else's line
    dial_backoff_base_s: float = 5.0  # 5 s + 1 s * n^2
    dial_backoff_max_s: float = 300.0

    # Connections
    half_open_max: int = 64  # handshakes under way
    half_open_per_ip: int = 8
    half_open_per_network: int = 32  # from one IPv4 /24 or IPv6 /48: whoever has one line leaves half of them to all others
    connects_per_ip_per_s: float = 5.0  # ~1 ms of CPU each
    connects_per_ip_burst: int = 64
    connections_per_ip_guests: int = 16
    connections_per_ip_members: int = 64  # one router may hide a lab
    connections_per_peer: int = 6  # 1 control + 4 lanes + 1 for replacing
    inbound_connections_max: int = 512  # with a quarter of the file descriptors, whichever is less
    inbound_members_share: float = 0.10
    inbound_network_share: float = 0.5  # to one IPv4 /24 or IPv6 /48 on the internet: nobody fills a house from one line
    accept_error_pause_s: float = 0.1
    duplicate_ping_timeout_s: float = 3.0

    # A change of the local network, and peers that are missed
    moved_ping_timeout_s: float = 2.0  # or four round trips; a living peer answers in one
    redial_later_s: float = 15.0  # a peer that stopped or is full: about what a restart takes, and it dials by itself then
    redial_missed_s: float = 600.0  # a peer that nobody asks for: longer than a router's restart

    # Lanes: bulk connections of a peer pair, and what outlives a connection
    lanes_max: int = 4  # more costs memory and is unfair to the others on the household's line
    lanes_punched_max: int = 2  # each lane of a punched pair is another punch and another mapping at both routers
    lanes_start: int = 2  # under a congestion control that takes loss for congestion: one such connection fills few lines
    lanes_start_bbr: int = 1
    lane_wait_s: float = 2.0  # chunks have waited so long running: the lanes that there are do not suffice
    lane_trial_s: float = 5.0  # a new lane shows what it brings after its slow start
    lane_gain: float = 0.15  # it stays if the rate rose by so much
    lane_retry_s: float = 60.0  # after one that brought nothing, or could not be had
    lane_dials: int = 3  # tries before the control connection carries everything
    lane_idle_s: float = 300.0  # without a channel
    lane_stalled_s: float = 3.0  # without progress while another moves; or lane_stalled_rtts, whichever is longer
    lane_stalled_rtts: float = 8.0
    resume_closed_s: float = 5.0  # the kernel told us of the end: a peer that lives dials again at once
    resume_silent_s: float = 60.0  # silence: its line is down, or its address has changed

    # Signed statements
    envelope_max_bytes: int = 64 * KIB
    peer_record_max_bytes: int = 2 * KIB
    voucher_max_bytes: int = 512  # ~240 are used; two of them leave three quarters of a peer record
    expiry_grace_s: float = 300.0  # wall clocks of contributors
    verified_cache_max: int = 4096
    peer_record_life_s: float = 7200.0
    peer_record_renew_s: float = 3600.0  # +- 10 %
    peer_record_interval_s: float = 10.0

    # Discovery
    seeds_max: int = 64
    seed_stagger_s: float = 0.25
    seed_retry_min_s: float = 1.0
    seed_retry_max_s: float = 60.0
    seed_file_check_s: float = 60.0
    seed_resolve_s: float = 600.0
    seeds_released_at_peers: int = 8
    seed_revisit_min_s: float = 600.0
    seed_revisit_max_s: float = 1200.0
    known_peers_max: int = 1000
    known_peers_write_s: float = 60.0
    known_peers_delay_s: float = 2.0
    known_peers_dialled: int = 4
    dial_hint_life_s: float = 30 * 86400.0
    peer_book_max: int = 4096  # a run
    peer_book_network_share: float = 0.25  # from one /16, in `internet` scope
    exchange_records_max: int = 24  # they fit one message
    exchange_interval_s: float = 60.0
    exchange_first_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    exchange_again_s: float = 6.0  # after a peer was missed; above what is answered for ever, so that nobody refuses
    exchange_answer_interval_s: float = 5.0
    exchange_answer_burst: int = 5
    seed_list_max_bytes: int = 32 * KIB  # 64 entries of 256 bytes and as much comment; signed it still fits one message
    seed_list_ask_s: float = 5.0  # answered from memory
    seed_fetch_max_bytes: int = 64 * KIB  # of a list at a URL, and of a file
    seed_fetch_timeout_s: float = 10.0
    observers_needed: int = 3  # distinct networks that must agree on our outside address
    observers_max: int = 64  # networks whose word is kept
    observation_life_s: float = 1800.0  # home lines change their address by night; reach is checked again as often

    # Clocks
    clock_peers_min: int = 3  # the median of two is the word of one
    clock_warn_s: float = 2.0  # a path's asymmetry explains tenths of a second; `expiry_grace_s` still has room for far more

    # Measuring (perf/1)
    perf_seconds_max: float = 15.0  # a direction; 10 s leave slow start behind, and nobody else may measure meanwhile
    perf_bytes_max: int = 16 * 1024 * MIB  # a direction: 10 Gbit/s for 13 s; below that, the time is what ends it
    perf_lanes_bytes: int = 2 * 1024 * MIB  # that we let go both ways over all numbers of lanes; 2 s each at a gigabit
    perf_grace_s: float = 5.0  # for what was under way when a direction's time was over, and for control messages
    perf_peer_interval_s: float = 60.0  # one measurement of a peer in so long: at most half of a line's idle share
    perf_pulses_per_s: float = 20.0  # round trips within a measurement; ours are 5 a second

    # Reachability
    reach_addresses_max: int = 4  # a question: IPv4 and IPv6, own and mapped
    reach_verdict_max_bytes: int = 1024
    reach_checkers: int = 3  # of which two must agree
    reach_agree: int = 2
    reach_again_s: float = 1800.0  # leases and forwardings of home routers change about daily
    reach_verdict_life_s: float = 3600.0
    reach_dial_s: float = 5.0  # as any dial
    reach_padding_bytes: int = 4096  # a dial-back is about 40 bytes and a TCP handshake: 20 times as much first
    reach_delay_most_s: float = 1.0  # so that many checkers cannot be aimed at one moment
    reach_peer_per_min: float = 12.0
    reach_total_per_min: float = 60.0
    reach_total_burst: float = 5.0  # newcomers that arrive together wait for each other, a second each
    reach_ask_s: float = 15.0  # padding, delay, dial and answer

    access_settles_s: float = 2.0  # a verdict that changes within this is not told

    # Hole punching
    punch_candidates_max: int = 8
    punch_tries: int = 3
    punch_pause_s: float = 1.0  # between them; the third is over within 20 s
    punch_again_s: float = 300.0
    punch_look_s: float = 5.0  # what spoke against it may have changed
    punch_reverse_s: float = 3.0  # for the caller's own addresses
    punch_talk_s: float = 5.0  # two round trips through a relay
    punch_dial_s: float = 4.0  # the kernel repeats its SYN after 1 s and 3 s
    punch_retry_s: float = 3.0  # after a refusal
    punches_at_once: int = 16
    punch_lane_interval_s: float = 10.0  # a lane that a peer has us punch: a port, a question outside and a dial each
    punch_lane_burst: float = 6.0  # two lanes, three tries each
    neighbours_max: int = 3  # private addresses of a peer behind our own router: cable, radio, and one to spare

    # Port mapping
    portmap_first_wait_s: float = 0.25  # RFC 6886, 3.1; doubled with each try
    portmap_tries: int = 5  # 8 s a language: the router is one hop away
    portmap_lease_s: float = 3600.0  # what a crash leaves behind lives no longer
    portmap_renew_least_s: float = 60.0  # whatever a router grants
    portmap_again_s: float = 300.0  # after a refusal: somebody may have changed a setting
    portmap_upnp_s: float = 5.0  # the library gives up its discovery after 4 s

    # Relay
    relays_held: int = 2  # as many vouchers as a record has room for
    relay_reservations_max: int = 128  # each a connection that is kept; a quarter of all inbound ones
    relay_reservations_per_network: int = 8  # from one IPv4 /24 or IPv6 /48: nobody takes all places from one line
    relay_reservation_life_s: float = 3600.0  # what a voucher's signature is worth at most
    relay_request_interval_s: float = 120.0  # a signature each
    relay_requests_burst: int = 10  # a line that comes and goes a few times in an hour
    relay_again_free_s: float = 60.0  # after the connection that held the place ended: its line failed, not the peer
    relay_free_held_s: float = 1.0  # held that long before: a second's signature a peer at most
    relay_requesters_max: int = 4096  # whose requests are counted; the one that asked longest ago is forgotten
    relay_signal_bytes_per_s: int = 64 * KIB  # a direction: a handshake and a punch need ~8 KiB
    relay_signal_bytes: int = 1 * MIB  # a direction; over it the circuit is reset
    relay_signal_s: float = 120.0  # three punches with their pauses
    relay_signal_circuits: int = 4  # a peer, at either end
    relay_signal_pair_circuits: int = 2  # one and its successor: a stranger alone cannot hold all four of a peer
    relay_bulk_circuits: int = 32  # a peer, at either end: 16 neighbours with control and one lane each
    relay_bulk_pair_circuits: int = 8  # control and lane, with successors for both, and as many again that end; no member has all 32
    relay_bulk_share_min_bytes_per_s: int = 256 * KIB  # below, a stage would hold up its pipeline: better no circuit than this one
    relay_signal_window_bytes: int = 64 * KIB  # a direction: a second at its rate
    relay_bulk_window_bytes: int = 1 * MIB  # a direction, at first: 100 Mbit/s over 80 ms
    relay_bulk_window_max_bytes: int = 4 * MIB  # 160 Mbit/s over 200 ms; a broken circuit may have taken so much and not given it
    relay_bulk_upload_share: float = 0.25  # of the measured upload, unless the operator sets a rate
    relay_bulk_start_bytes_per_s: float = 2e6  # until the line has shown more: a sixth of the slowest fibre's upload
    relay_peer_bytes_per_s: float = 20e6  # 160 Mbit/s, what a good household line sends
    relay_burst_s: float = 1.0  # of each rate: a tensor of the small kind passes at once
    relay_stall_s: float = 60.0  # for one piece of a circuit to be taken; whoever reads at all does it at the least share in 0.25 s
    relay_notice_s: float = 30.0  # a relay that stops lets its circuits stand for so long, if whoever stops it waits
    relay_left_most_s: float = 600.0  # one that says every time that it stops, and does not, is asked again after so long
    relay_opens_per_s: float = 0.5  # circuits that one peer opens: each is a stream to the target and two notes
    relay_opens_burst: float = 64.0  # whoever starts has 32 neighbours, with a control circuit and a lane each
    relay_quantum_bytes: int = 64 * KIB  # of a pair's turn: 0.25 s at the least share, and few turns a megabyte

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "lanes_max" and value == 0:
                continue  # one mixed connection
            if any(number <= 0 for number in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{field.name} must be above zero, is {value}")
        if self.peer_record_renew_s * (1 + RENEW_JITTER) >= self.peer_record_life_s:
            # FIND-15: a record that is renewed later than it expires makes a live peer disappear.
            latest = f"peer_record_renew_s = {self.peer_record_renew_s} (+ {RENEW_JITTER:.0%})"
            raise ValueError(f"{latest} must be below peer_record_life_s = {self.peer_record_life_s}")
        for small, large in _NESTED:
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small} = {getattr(self, small)} must not be above {large} = {getattr(self, large)}")


# What must not be larger than what.  A pair the wrong way round would make a well-behaved peer look hostile, or wait for ever.
_NESTED: tuple[tuple[str, str], ...] = (
    ("hello_max_bytes", "preauth_max_bytes"),
    ("handshake_message_max_bytes", "preauth_max_bytes"),
    ("record_plaintext_min_bytes", "record_plaintext_start_bytes"),
    ("record_plaintext_start_bytes", "record_plaintext_max_bytes"),
    ("record_rekey_records", "record_refuse_records"),
    ("record_rekey_bytes", "record_refuse_bytes"),
    ("message_max_bytes", "record_plaintext_max_bytes"),
    ("message_max_bytes", "stream_window_control_bytes"),  # else a whole message could never be sent
    ("message_max_bytes", "stream_window_min_bytes"),
    ("open_meta_max_bytes", "message_max_bytes"),
    ("hello_frame_max_bytes", "message_max_bytes"),
    ("peer_record_max_bytes", "hello_frame_max_bytes"),
    ("voucher_max_bytes", "peer_record_max_bytes"),
    ("relay_reservations_per_network", "relay_reservations_max"),
    ("relay_signal_pair_circuits", "relay_signal_circuits"),
    ("relay_notice_s", "draining_timeout_s"),  # else the notice would promise what the connection does not keep
    ("relay_signal_window_bytes", "relay_bulk_window_bytes"),
    ("relay_bulk_window_bytes", "relay_bulk_window_max_bytes"),
    ("relay_bulk_window_max_bytes", "connection_window_max_bytes"),
    ("relay_quantum_bytes", "relay_bulk_share_min_bytes_per_s"),  # else a pair would have its turn less than once a second
    ("chunk_bytes", "record_plaintext_max_bytes"),
    ("chunk_bytes", "tensor_max_bytes"),
    ("stream_window_control_bytes", "connection_window_guest_bytes"),
    ("stream_window_control_bytes", "connection_window_control_bytes"),
    ("stream_window_min_bytes", "stream_window_bulk_bytes"),
    ("stream_window_bulk_bytes", "stream_window_max_bytes"),
    ("stream_window_bulk_bytes", "connection_window_lane_bytes"),
    ("stream_window_max_bytes", "connection_window_max_bytes"),  # a stream takes its connection along
    ("connection_window_guest_bytes", "connection_window_control_bytes"),  # every connection starts from a guest's
    ("connection_window_control_bytes", "connection_window_lane_bytes"),
    ("connection_window_lane_bytes", "connection_window_max_bytes"),
    ("inbound_backlog_max", "inbound_streams_max"),
    ("lanes_start_bbr", "lanes_start"),
    ("resume_closed_s", "resume_silent_s"),
    ("ping_interval_s", "dead_after_s"),
    ("quiet_ping_s", "quiet_dead_s"),
    ("quiet_dead_s", "dead_after_s"),
    ("half_open_per_ip", "half_open_per_network"),
    ("half_open_per_network", "half_open_max"),
    ("peer_record_interval_s", "peer_record_renew_s"),
    ("seed_retry_min_s", "seed_retry_max_s"),
    ("seed_revisit_min_s", "seed_revisit_max_s"),
    ("seed_list_max_bytes", "seed_fetch_max_bytes"),
    ("observers_needed", "observers_max"),
    ("dial_backoff_base_s", "dial_backoff_max_s"),
    ("portmap_renew_least_s", "portmap_lease_s"),
    ("portmap_again_s", "portmap_lease_s"),  # a refused renewal is tried again while the lease still runs
)

DEFAULT_LIMITS = Limits()
