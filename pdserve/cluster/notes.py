"""What the parts of one installation leave for each other in Ray's key-value store.

    replicas --announce()--> where the registry is --read--> autoscaling policy
    policy   --publish()---> its plan              --read--> `pdserve scale`
    `pdserve scale` --ask()--> sizes               --read--> autoscaling policy
    router in Serve --put_router()--> its address  --read--> workers without another registry

The store belongs to the cluster's head; whoever reaches it can run code there anyway, so a registry's
password is as safe in it as in a replica's arguments. Methods block for a call to the head; none
belongs on an event loop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from pydantic import TypeAdapter
from ray.experimental import internal_kv

from pdserve.registry.settings import RegistrySettings
from pdserve.rpc.settings import RpcSettings
from pdserve.scaling.plan import Plan, Sizes

_NAMESPACE = "pdserve"


@dataclass(frozen=True)
class Announced:
    """How to reach the registry that the workers of a generation use."""

    url: str  # memory://: that of the router in the same Serve
    registry: RegistrySettings
    rpc: RpcSettings

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return TypeAdapter(cls).validate_json(text)  # settings hold settings, which `**` would leave as tables


class Notes:
    """Of one generation of pools; "" is the first."""

    def __init__(self, generation: str) -> None:
        self._generation = generation

    def announce(self, announced: Announced) -> None:
        self._put("registry", announced.to_json())

    def announced(self) -> Announced | None:
        text = self._get("registry")
        return Announced.from_json(text) if text else None

    def publish(self, plan: Plan) -> None:
        self._put("plan", plan.to_json())

    def plan(self) -> Plan | None:
        text = self._get("plan")
        return Plan.from_json(text) if text else None

    def ask(self, sizes: Sizes | None) -> None:
        """None: the configuration and the policy decide."""
        if sizes is None:
            internal_kv._internal_kv_del(self._key("sizes"), namespace=_NAMESPACE)
        else:
            self._put("sizes", json.dumps(dict(sizes)))

    def asked(self) -> Sizes | None:
        text = self._get("sizes")
        return json.loads(text) if text else None

    def put_router(self, address: str) -> None:
        """host:port of a gateway whose registry workers of any generation may use."""
        internal_kv._internal_kv_put("router", address.encode(), overwrite=True, namespace=_NAMESPACE)

    def router(self) -> str:
        """Empty: there has been none."""
        return (internal_kv._internal_kv_get("router", namespace=_NAMESPACE) or b"").decode()

    def clear(self) -> None:
        for name in ("registry", "plan", "sizes"):
            internal_kv._internal_kv_del(self._key(name), namespace=_NAMESPACE)

    def _put(self, name: str, text: str) -> None:
        internal_kv._internal_kv_put(self._key(name), text.encode(), overwrite=True, namespace=_NAMESPACE)

    def _get(self, name: str) -> str:
        return (internal_kv._internal_kv_get(self._key(name), namespace=_NAMESPACE) or b"").decode()

    def _key(self, name: str) -> str:
        return f"{name}:{self._generation}"
