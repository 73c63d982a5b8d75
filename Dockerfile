# syntax=docker/dockerfile:1
# Two images from one file:
#   docker build --target cpu -t qworker:cpu .    onnxruntime on the CPU
#   docker build --target gpu -t qworker:gpu .    TensorRT; run it with --gpus all

# --- the wheel, built once for both ---
FROM python:3.12-slim AS wheel
WORKDIR /src
RUN pip install --no-cache-dir 'hatchling>=1.27,<2'
COPY pyproject.toml README.md LICENSE ./
COPY qworker qworker
RUN python -m hatchling build --target wheel --directory /wheels

# --- CPU ---
FROM python:3.12-slim AS cpu-packages
COPY --from=wheel /wheels /wheels
COPY ops/requirements.lock /requirements.lock
# The lock holds the development tools too: as constraints it fixes versions without installing them all.
RUN sed -e 's/ *\\$//' -e '/^ *--hash/d' /requirements.lock >/constraints.txt \
    && python -m venv /opt/qworker \
    && /opt/qworker/bin/pip install --no-cache-dir --constraint /constraints.txt \
        "qworker[s3,otel,fast] @ file://$(ls /wheels/*.whl)"

FROM python:3.12-slim AS cpu
COPY --from=cpu-packages /opt/qworker /opt/qworker
ENV PATH=/opt/qworker/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QWORKER_STORE=/models \
    QWORKER_HTTP_HOST=0.0.0.0 \
    QWORKER_HTTP_PORT=8080 \
    QWORKER_LOG_FORMAT=json
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin qworker \
    && install -d -o qworker /models
USER 10001
VOLUME /models
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['QWORKER_HTTP_PORT'] + '/healthz', timeout=2)"]
# SIGTERM drains; give it longer than QWORKER_GRACE before a SIGKILL (docker stop --time 45)
STOPSIGNAL SIGTERM
ENTRYPOINT ["qworker"]
CMD ["worker"]

# --- GPU ---
FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS gpu-packages
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
COPY ops/requirements.lock /requirements.lock
RUN sed -e 's/ *\\$//' -e '/^ *--hash/d' /requirements.lock >/constraints.txt \
    && python3.12 -m venv /opt/qworker \
    && /opt/qworker/bin/pip install --no-cache-dir --constraint /constraints.txt \
        "qworker[gpu,s3,otel,fast] @ file://$(ls /wheels/*.whl)"

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin qworker \
    && install -d -o qworker /models
COPY --from=gpu-packages /opt/qworker /opt/qworker
ENV PATH=/opt/qworker/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    QWORKER_STORE=/models \
    QWORKER_HTTP_HOST=0.0.0.0 \
    QWORKER_HTTP_PORT=8080 \
    QWORKER_LOG_FORMAT=json
USER 10001
VOLUME /models
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['QWORKER_HTTP_PORT'] + '/healthz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["qworker"]
CMD ["worker"]
