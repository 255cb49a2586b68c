"""Another name of ``kvcore.requests.manager``: requests over time."""

from kvcore.requests.manager import Manager, Request, RequestState, TakenOver

__all__ = ["Manager", "Request", "RequestState", "TakenOver"]
