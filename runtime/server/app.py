"""The routes. Each parses, submits, and answers; the engine computes in its own thread (loop.py)."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from compress import __version__
from compress.errors import UserError
from compress.runtime.server.accepted import CHAT, COMPLETION
from compress.runtime.server.errors import ApiError, from_validation, refusal
from compress.runtime.server.gate import STOPPING, Gate
from compress.runtime.server.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    Part,
    StreamOptions,
    TokenizeBody,
)
from compress.runtime.server.service import Service
from compress.runtime.server.sse import json_response

NESTED = {*StreamOptions.model_fields, *ChatMessage.model_fields, *Part.model_fields}
FIELDS = {
    "/v1/completions": frozenset({*CompletionBody.model_fields, *COMPLETION, *NESTED}),
    "/v1/chat/completions": frozenset({*ChatBody.model_fields, *CHAT, *NESTED}),
    "/tokenize": frozenset({*TokenizeBody.model_fields, *NESTED}),
    "/detokenize": frozenset(DetokenizeBody.model_fields),
}


def build_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="compress",
        version=__version__,
        lifespan=service.lifespan,
        docs_url=None,  # its pages would load scripts from elsewhere
        redoc_url=None,
        strict_content_type=False,
    )
    options = service.options
    app.add_middleware(
        Gate,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        bodies=service.bodies,
        draining=lambda: service.draining,
        refused=service.metrics.refused,
    )
    _add_errors(app, service)
    _add_models(app, service)
    _add_status(app, service)
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await service.complete(request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await service.chat(request, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.model_card(name) for name in service.options.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(service.model_card(service.check_model(name)))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        service.check_model(body.model)
        return json_response(await service.tokenize(body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        return json_response({"prompt": await service.prompts.decode(body.tokens)})


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        if service.loop.dead:
            return json_response(ApiError(503, f"the engine has failed: {service.loop.dead}"))
        if service.draining:
            return json_response(ApiError(503, STOPPING))
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI, service: Service) -> None:
    def answer(error: ApiError) -> Response:
        service.metrics.refused(error.status)
        return json_response(error)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return answer(refusal(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        return answer(from_validation(list(error.errors()), FIELDS.get(request.url.path, frozenset()), kind))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        told = "the body is not JSON" if error.detail == "There was an error parsing the body" else error.detail
        if error.status_code in (404, 405):
            told = f"{request.method} {request.url.path}: {error.detail}"
        return answer(ApiError(error.status_code, told, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, f"the server failed: {type(error).__name__}"))
