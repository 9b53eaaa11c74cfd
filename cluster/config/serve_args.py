"""The settings that a server has beside those of its engines: addresses, groups, keys, what it admits."""

from typing import Annotated

from cluster.config.args import EngineArgs
from cluster.config.setting import Setting
from cluster.config.values import (
    CountOrZero,
    FilePath,
    GatewayCount,
    Port,
    PortOrNone,
    Share,
    Size,
    SmallCount,
    Text,
)


class ServeArgs(EngineArgs):
    """Settings of `latentray serve`: an engine and its gateway."""

    num_groups: Annotated[
        SmallCount,
        Setting(
            "Replicas of the model, each a coordinator and -tp shards of its own. Requests are spread over "
            "them, and those of one that dies go on at another.",
            group="Parallelism",
            short="--data-parallel-size",
        ),
    ] = 1
    gateways: Annotated[
        GatewayCount,
        Setting(
            "Gateways, each on a node of its own and on the same ports; any of them answers by all groups. "
            "per-node: one on every node of the cluster, also on those that come later.",
            group="Server",
        ),
    ] = 1
    host: Annotated[
        Text,
        Setting(
            "Address to listen on; 0.0.0.0 serves other machines too.",
            rule="an address of this machine",
            group="Server",
            metavar="HOST",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        Setting("Port of the gRPC server; 0 takes a free one.", group="Server"),
    ] = 50051
    http_port: Annotated[
        PortOrNone,
        Setting(
            "Port of OpenAI's API over HTTP (/v1/chat/completions, ...); 0 takes a free one, none "
            "serves gRPC alone.",
            group="Server",
        ),
    ] = 8000
    metrics_port: Annotated[
        PortOrNone,
        Setting("Port of Prometheus metrics over HTTP, at /metrics; 0 takes a free one.", group="Server"),
    ] = None
    max_message_size: Annotated[
        Size,
        Setting("Bytes of one gRPC message, at most, in both directions.", group="Server"),
    ] = 16 * 2**20
    max_queued_requests: Annotated[
        CountOrZero,
        Setting(
            "Requests that may wait in the queues of all groups, whichever gateway they came by (one with n "
            "completions counts n times); more are refused until some have begun. 0: no bound.",
            group="Admission",
        ),
    ] = 4096
    max_queued_tokens: Annotated[
        CountOrZero,
        Setting("Prompt tokens that may wait there; 0: no bound.", group="Admission"),
    ] = 0
    max_tenant_share: Annotated[
        Share,
        Setting(
            "Of both, what the requests of one tenant (of the API key, else X-Tenant) may take, so that "
            "others find room.",
            group="Admission",
        ),
    ] = 1.0
    insecure: Annotated[
        bool,
        Setting(
            "Serve other machines without TLS or without keys, where a proxy or a network policy guards "
            "the ports.",
            group="Access",
        ),
    ] = False
    api_keys: Annotated[
        FilePath | None,
        Setting(
            "YAML file of the API keys that clients must send, with their tenants. A changed file is read "
            "while serving.",
            rule="a file of keys that only its user may read",
            group="Access",
            metavar="FILE",
        ),
    ] = None
    tls_cert: Annotated[
        FilePath | None,
        Setting(
            "PEM file of the server's certificate, then those that signed it: gRPC, HTTP and metrics "
            "speak TLS. Changed files are read while serving.",
            rule="a PEM file of certificates",
            group="Access",
            metavar="FILE",
        ),
    ] = None
    tls_key: Annotated[
        FilePath | None,
        Setting(
            "PEM file of its private key, without a passphrase.",
            rule="a PEM file that only its user may read",
            group="Access",
            metavar="FILE",
        ),
    ] = None
    tls_client_ca: Annotated[
        FilePath | None,
        Setting(
            "PEM file of certificates: clients must have one that these signed.",
            rule="a PEM file of certificates",
            group="Access",
            metavar="FILE",
        ),
    ] = None

    def ports_by_flag(self) -> dict[str, int | None]:
        """The ports to listen on by the flags that give them; 0: a free one, None: not served."""
        return {"--port": self.port, "--http-port": self.http_port, "--metrics-port": self.metrics_port}
