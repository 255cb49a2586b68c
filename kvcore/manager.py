"""Another name of ``kvcore.requests.manager``: requests over time."""

from kvcore.requests.manager import Manager, Place, Request, TakenOver

__all__ = ["Manager", "Place", "Request", "TakenOver"]
