# latentray for NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t latentray:0.1.0-cuda .
# torch's wheel brings CUDA's libraries, the node its driver.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY constraints-cpu.txt ./
# torch first and by itself: it has an index of its own, and its layer outlives changes of ours
RUN pip install --no-cache-dir --prefix=/install --index-url https://download.pytorch.org/whl/cu130 \
        "$(grep '^torch==' constraints-cpu.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY cluster cluster
COPY actors actors
COPY kernels_integration kernels_integration
# xgrammar by itself: what it also asks for, transformers and another Triton, grammars have no use for
RUN PYTHONPATH=/install/lib/python3.11/site-packages \
    pip install --no-cache-dir --prefix=/install -c constraints-cpu.txt '.[data,gpu]' apache-tvm-ffi
RUN pip install --no-cache-dir --prefix=/install --no-deps -c constraints-cpu.txt xgrammar

FROM python:${PYTHON}
# Triton compiles the launchers of its kernels with a C compiler
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# /usr/local/bin: KubeRay starts Ray by a login shell, which knows no other PATH
COPY --from=build /install /usr/local
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin latentray
# which GPUs is the node's decision
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/latentray
EXPOSE 50051 8000 9400
ENTRYPOINT ["latentray"]
# --insecure: who reaches the container is up to docker or Kubernetes; give keys and certificates where that is not enough
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
