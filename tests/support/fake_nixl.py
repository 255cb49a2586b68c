"""A NIXL agent without NIXL: notifications in a list, reads by ``memmove`` from registered memory only."""

import ctypes
from typing import Any, ClassVar


class FakeAgent:
    """The calls that ``kvcore.interop.nixl`` makes, between agents of one process.

    Attributes:
        name: of the agent.
        descriptors: of the largest transfer so far.
    """

    agents: ClassVar[dict[str, "FakeAgent"]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.descriptors = 0
        self._memory: list[tuple[int, int]] = []
        self._notes: list[tuple[str, bytes]] = []
        self.agents[name] = self

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def send_notif(self, peer: str, message: bytes) -> None:
        self.agents[peer]._notes.append((self.name, message))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while self._notes:
            sender, message = self._notes.pop(0)
            found.setdefault(sender, []).append(message)
        return found

    def register_memory(self, regions: list[tuple[int, int, int, str]], memory: str) -> Any:
        assert memory == "DRAM"
        self._memory += [region[:2] for region in regions]
        return [region[:2] for region in regions]

    def deregister_memory(self, registration: Any) -> None:
        for region in registration:
            self._memory.remove(region)

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], memory: str) -> list[tuple[int, int, int]]:
        assert memory == "DRAM"
        return descriptors

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> Any:
        assert operation == "READ"
        self.descriptors = max(self.descriptors, len(here))
        for agent, pieces in ((self, here), (self.agents[peer], there)):
            for address, size, _ in pieces:
                if not any(start <= address and address + size <= start + length for start, length in agent._memory):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return list(zip(here, there, strict=True))

    def transfer(self, pairs: Any) -> str:
        for (target, size, _), (source, _, _) in pairs:
            ctypes.memmove(target, source, size)
        return "DONE"

    def check_xfer_state(self, _: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, _: Any) -> None:
        pass
