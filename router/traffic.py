"""What this router's requests came to, counted as it happens. Belongs to one event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.errors import PdserveError
from pdserve.telemetry.counting import FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, Counts, Histograms, Refusals
from router.request import Request

QUOTA = "TENANT_"  # what the reasons of a tenant's limits begin with


@dataclass
class Traffic:
    """Since the router started. Models and tenants are those that workers and operators have named."""

    requests: Counts = field(default_factory=lambda: Counts("model", "outcome"))
    prompt_tokens: Counts = field(default_factory=lambda: Counts("model"))
    generation_tokens: Counts = field(default_factory=lambda: Counts("model"))
    first_token_s: Histograms = field(default_factory=lambda: Histograms(FIRST_TOKEN_S, "model"))
    inter_token_s: Histograms = field(default_factory=lambda: Histograms(INTER_TOKEN_S, "model"))
    request_s: Histograms = field(default_factory=lambda: Histograms(REQUEST_S, "model"))
    tenant_requests: Counts = field(default_factory=lambda: Counts("tenant"))
    tenant_tokens: Counts = field(default_factory=lambda: Counts("tenant", "kind"))
    refusals: Refusals = field(default_factory=Refusals)
    quota_refusals: Counts = field(default_factory=lambda: Counts("tenant", "reason"))
    failures: Counts = field(default_factory=lambda: Counts("pool", "reason"))
    resumes: int = 0

    def ended(
        self, request: Request, outcome: str, refusal: PdserveError | None, output_tokens: int, seconds: float
    ) -> None:
        """However a checked request came out.

        Args:
            refusal: why no worker was asked for it; such a request counts nowhere else.
        """
        model, tenant, prompt_tokens = request.model, request.tenant, len(request.prompt_ids)
        if refusal is not None:
            self.refusals.count(refusal)
            if refusal.reason.startswith(QUOTA):
                self.quota_refusals.add(tenant, refusal.reason)
            return
        self.requests.add(model, outcome)
        self.prompt_tokens.add(model, by=prompt_tokens)
        self.generation_tokens.add(model, by=output_tokens)
        self.request_s.of(model).observe(seconds)
        self.tenant_requests.add(tenant)
        self.tenant_tokens.add(tenant, "prompt", by=prompt_tokens)
        self.tenant_tokens.add(tenant, "generation", by=output_tokens)
