# The trainer, and whatever else of this project runs beside it (synthesis, evaluation, launch.convert), from a checkout:
#   docker build -f launch/recipes/containers/trainer.Dockerfile --build-arg ACCELERATOR=tpu -t REGISTRY/trainer:tpu .
# ACCELERATOR is cpu (with Ray and the offline teacher's facts), cuda (13; the host brings the driver) or tpu.
FROM python:3.11.14-slim-bookworm

ARG ACCELERATOR=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/astra
COPY launch/recipes/containers/requirements/trainer-${ACCELERATOR}.txt requirements.txt
RUN pip install --no-deps -r requirements.txt && pip check
COPY LICENSE ./
COPY sandbox sandbox
COPY synthesis synthesis
COPY astra_jax astra_jax
COPY configs configs
COPY launch launch
ENV PYTHONPATH=/opt/astra
RUN python -m launch.grpo --version
CMD ["python", "-m", "launch.grpo", "--help"]
