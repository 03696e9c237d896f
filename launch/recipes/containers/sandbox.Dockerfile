# The sandbox service: the standard library, aiohttp, and nothing that a call could want; from a checkout:
#   docker build -f launch/recipes/containers/sandbox.Dockerfile -t REGISTRY/sandbox:latest .
# Which tier a pod gets, and how to give it a better one: docs/sandbox.md.
FROM python:3.11.14-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/astra
COPY launch/recipes/containers/requirements/sandbox.txt requirements.txt
RUN pip install --no-deps -r requirements.txt && pip check
COPY LICENSE ./
COPY sandbox sandbox
# The program's flags need these two.
COPY astra_jax astra_jax
COPY launch launch
ENV PYTHONPATH=/opt/astra
RUN python -m launch.sandbox_server --version && useradd --uid 10001 --no-create-home sandbox
USER 10001
EXPOSE 8700
CMD ["python", "-m", "launch.sandbox_server"]
