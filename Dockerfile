# The server as an image. `docker build .` builds the target cpu, the last one; `docker build --target cuda .` the other.
# What it installs from the package index are the versions and hashes in packaging/*.lock, which `make lock` renews.

FROM rust:1.89-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/maturin
WORKDIR /source
COPY . .
RUN /opt/maturin/bin/pip install --no-cache-dir --require-hashes --requirement packaging/build.lock
RUN /opt/maturin/bin/maturin build --release --locked --out /wheels && python3 packaging/cpu_wheel.py /wheels/*.whl

FROM python:3.13-slim-bookworm AS runtime
RUN useradd --create-home --uid 1000 chairlift && install --directory --owner chairlift /models /run/chairlift
ENV CHAIRLIFT_CACHE_DIR=/models CHAIRLIFT_ADMIN_SOCKET=/run/chairlift/admin.sock PYTHONUNBUFFERED=1
VOLUME /models
EXPOSE 8000
COPY docker/health.py /opt/health.py
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m CMD ["python", "/opt/health.py"]
ENTRYPOINT ["chairlift"]
CMD ["serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
# Triton compiles its kernels' launchers with a C compiler. The driver comes from the host (NVIDIA Container Toolkit).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=packaging,target=/packaging \
    pip install --no-cache-dir --require-hashes --requirement /packaging/cuda.lock \
    && pip install --no-cache-dir --no-deps /wheels/chairlift-*.whl
USER 1000

FROM runtime AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,source=packaging,target=/packaging \
    pip install --no-cache-dir --require-hashes --requirement /packaging/cpu.lock \
    && pip install --no-cache-dir --no-deps /wheels/chairlift_cpu-*.whl
USER 1000
