"""Who may speak to the controller, beyond the token: nobody whose certificate was revoked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from ttp.wire.revocation import Guard

HEALTH = "/grpc.health.v1.Health/"


class RevocationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every request that comes by a certificate which the job's list has revoked, except health checks."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH):
            return handler
        return self._behind(handler)

    async def _admit(self, context: Any) -> None:
        problem = await asyncio.to_thread(self._guard.caller_problem, context.auth_context())
        if problem:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the certificate of this request: {problem}")

    def _behind(self, handler: Any) -> Any:
        """A handler of the same kind that looks first."""
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        make, inner = kinds[(bool(handler.request_streaming), bool(handler.response_streaming))]

        async def unary(request: Any, context: Any) -> Any:
            await self._admit(context)
            return await inner(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._admit(context)
            async with contextlib.aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer

        behaviour = stream if handler.response_streaming else unary
        return make(behaviour, handler.request_deserializer, handler.response_serializer)
