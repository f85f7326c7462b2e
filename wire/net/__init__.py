"""The only room with sockets: connections, dialling, listening, seeds, and the facade `open_net`."""

from wire.events import Kind
from wire.net.bytestream import ByteStream
from wire.net.causes import Cause
from wire.net.dial import DialFailed
from wire.net.interfaces import NetworkChanged
from wire.net.listen import BindFailed
from wire.net.netevents import (
    AccessChanged,
    ClockOff,
    Complaint,
    Listening,
    NetEvent,
    NoSeedReachable,
    NotListening,
    PathChanged,
    PeerConnected,
    PeerLost,
    PortMapped,
    Punched,
    ReachChanged,
    RecordLearned,
    RelayDisagrees,
    RelayThrottled,
    SeedStateChanged,
    Traffic,
)
from wire.net.network import Net
from wire.net.opening import open_net
from wire.net.peer import Peer
from wire.net.peerstatus import ConnectionStatus, PeerStatus, peer_status
from wire.net.primary import PeerStats
from wire.net.ready import ReadyBytes
from wire.net.receiver import Dropped, Received, TensorReceiver
from wire.net.relay import RelayOffer
from wire.net.seedlist import SeedEntry, SeedList, SeedListError
from wire.net.seeds import SeedState, SeedStatus
from wire.net.sender import TensorSender
from wire.net.stream import MessageStream
from wire.net.transport import Listener, Pipe, TcpTransport, Transport
from wire.packing import PackingStats
from wire.path import DIRECT, PUNCHED, Path, PathKind, relayed_via
from wire.pipeinfo import PipeInfo

__all__ = [
    "DIRECT",
    "PUNCHED",
    "AccessChanged",
    "BindFailed",
    "ByteStream",
    "Cause",
    "ClockOff",
    "Complaint",
    "ConnectionStatus",
    "DialFailed",
    "Dropped",
    "Kind",
    "Listener",
    "Listening",
    "MessageStream",
    "Net",
    "NetEvent",
    "NetworkChanged",
    "NoSeedReachable",
    "NotListening",
    "PackingStats",
    "Path",
    "PathChanged",
    "PathKind",
    "Peer",
    "PeerConnected",
    "PeerLost",
    "PeerStats",
    "PeerStatus",
    "Pipe",
    "PipeInfo",
    "PortMapped",
    "Punched",
    "ReachChanged",
    "ReadyBytes",
    "Received",
    "RecordLearned",
    "RelayDisagrees",
    "RelayOffer",
    "RelayThrottled",
    "SeedEntry",
    "SeedList",
    "SeedListError",
    "SeedState",
    "SeedStateChanged",
    "SeedStatus",
    "TcpTransport",
    "TensorReceiver",
    "TensorSender",
    "Traffic",
    "Transport",
    "open_net",
    "peer_status",
    "relayed_via",
]
