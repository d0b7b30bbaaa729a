"""What `./infra/up` prints of a stack that is up."""

from rich.console import Console

from infra.endpoints import Endpoints
from infra.local.services import StackConfig


def print_guide(
    console: Console, at: Endpoints, tenant: str, key: str, model_id: str, config: StackConfig
) -> None:
    """Where to go on: addresses, and a request to try."""
    body = f'{{"model": "{model_id}", "prompt": "Kafka is", "max_tokens": 32, "stream": true}}'
    console.rule("up; Ctrl-C stops all")
    lines = (
        f"HTTP API    {at.gateway}   (OpenAI's clients: base_url {at.gateway}/v1)",
        f"SQL         {at.sql}   (.venv/bin/headrace sql 'SELECT * FROM usage_final')",
        f"Kafka       {at.kafka}   (batch.requests.{tenant} → batch.results.{tenant})",
        *([f"            a login: .venv/bin/headrace tenant kafka-login {tenant}"] if at.broker_auth else []),
        *(
            [f"workers     {', '.join(f'{slot} {role}' for slot, role in enumerate(config.roles))}"]
            if config.roles
            else []
        ),
        f"logs        {config.data_dir / 'logs'}",
        "",
        f"curl -N {at.gateway}/v1/generate -H 'Authorization: Bearer {key}' -d '{body}'",
        "",
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
