# The server of memory_vit, without TensorFlow.
#
#   docker build --tag memory_vit .
#   docker build --tag memory_vit:cuda --build-arg JAX_EXTRA=cuda .
#   docker run --publish 127.0.0.1:8000:8000 --volume "$PWD/models:/models:ro" \
#     memory_vit --backbone=/models/backbone.npz --task=/models/tasks
FROM python:3.12-slim

# "cuda", "cuda13" or "tpu", as in pyproject.toml; none is for CPUs.
ARG JAX_EXTRA=""

# setuptools reads these; configs/ is where a link in memory_vit/ leads.
COPY pyproject.toml README.md LICENSE /src/
COPY memory_vit /src/memory_vit
COPY configs /src/configs
RUN pip install --no-cache-dir "/src[serve${JAX_EXTRA:+,$JAX_EXTRA}]" \
  && rm -r /src

RUN useradd --create-home serve
USER serve
WORKDIR /home/serve

EXPOSE 8000
# Compiling takes a while: /healthz answers before, /readyz only after.
HEALTHCHECK --start-period=120s CMD ["python", "-c", \
  "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz', timeout=5)"]
# Within a container all addresses are its own; publish the port as you mean it.
ENTRYPOINT ["python", "-m", "memory_vit.serve", "--host=0.0.0.0"]
