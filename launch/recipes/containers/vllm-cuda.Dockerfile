# A rollout server on GPUs: vLLM's own image of that version, and our plugin beside it; from a checkout:
#   docker build -f launch/recipes/containers/vllm-cuda.Dockerfile -t REGISTRY/vllm:cuda .
FROM vllm/vllm-openai:v0.32.0

COPY astra_jax/rollout/vllm/plugin /opt/plugin
RUN uv pip install --system --no-cache tensorstore==0.1.86 && uv pip install --system --no-cache --no-deps /opt/plugin
ENV VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=astra,astra_sync
EXPOSE 8000
ENTRYPOINT []
CMD ["vllm", "serve", "--help"]
