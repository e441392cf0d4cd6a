# The server of memory_vit, without TensorFlow.
#
#   docker build --tag memory_vit .
#   docker build --tag memory_vit:cuda --build-arg JAX_EXTRA=cuda .
#   docker run --publish 127.0.0.1:8000:8000 --volume "$PWD/models:/models:ro" \
#     --volume memory_vit_cache:/cache \
#     memory_vit --backbone=/models/backbone.npz --task=/models/tasks
#
# For an image that is the same tomorrow: --build-arg BASE=python@sha256:...
ARG BASE=python:3.12-slim
FROM ${BASE}

# "cuda", "cuda13" or "tpu", as in pyproject.toml; none is for CPUs.
ARG JAX_EXTRA=""

# setuptools reads these; configs/ is where a link in memory_vit/ leads.
COPY pyproject.toml README.md LICENSE Dockerfile.constraints /src/
COPY memory_vit /src/memory_vit
COPY configs /src/configs
RUN pip install --no-cache-dir --constraint /src/Dockerfile.constraints \
  "/src[serve${JAX_EXTRA:+,$JAX_EXTRA}]" \
  && rm -r /src

# As a volume, /cache keeps compiled programs and downloads for the next start,
# and /state the tasks, with --state_dir=/state.
RUN useradd --uid 10001 --create-home serve \
  && install --directory --owner=10001 --mode=700 /cache /state
ENV MEMORY_VIT_CACHE=/cache
# A number: Kubernetes (runAsNonRoot) cannot tell who a name is.
USER 10001
WORKDIR /home/serve

EXPOSE 8000
# Compiling takes a while: /healthz answers before, /readyz only after. The port
# is that of the command line.
HEALTHCHECK --start-period=120s CMD python -c "import re, urllib.request as r; \
  port = re.search('--port[^0-9]([0-9]+)', open('/proc/1/cmdline').read()); \
  r.urlopen(f'http://127.0.0.1:{port[1] if port else 8000}/healthz', timeout=5)"
# Within a container all addresses are its own; publish the port as you mean it.
ENTRYPOINT ["python", "-m", "memory_vit", "serve", "--host=0.0.0.0"]
