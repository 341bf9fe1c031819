# An image with everything installed, for a CPU or an NVIDIA GPU.
#   docker build -t posttrain .                                       CPU
#   docker build -t posttrain-cuda --build-arg DEVICE=cuda .          GPU: run it with --gpus all (NVIDIA Container Toolkit)
#   mkdir -p runs                                                     else Docker makes it, for root alone
#   docker run --rm -v "$PWD/runs:/app/runs" posttrain                the quickstart; its results lie in runs/
#   docker run --rm -it -v "$PWD/runs:/app/runs" posttrain posttrain sft --help
# The chat in the browser, then at http://127.0.0.1:7860 of this machine; other containers reach it too, so it asks for a
# password, which is typed at the start:
#   docker run --rm -it -p 127.0.0.1:7860:7860 -v "$PWD/runs:/app/runs" posttrain posttrain chat --config quickstart/chat --web --host 0.0.0.0 --password
# Inside it is user 1000, who must be able to write to what is mounted; other users: --user "$(id -u)" -e HOME=/tmp.
# deep_coder runs programs in bubblewrap, which needs namespaces of its own: --security-opt seccomp=unconfined (where
# AppArmor is on, apparmor=unconfined as well); without them it refuses to start. All else needs no such option.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

ARG DEVICE=cpu
# Triton compiles its kernels when a GPU first runs them: a C compiler (Python's headers are in the base image).
# hadolint ignore=DL3008,SC2086
RUN case "$DEVICE" in cpu) more="" ;; cuda) more="gcc libc6-dev" ;; *) echo "DEVICE is cpu or cuda" >&2; exit 2 ;; esac; \
    apt-get update && apt-get install -y --no-install-recommends bubblewrap git make $more && rm -rf /var/lib/apt/lists/*

# Packages change more rarely than the code, so they are a layer below it. PyPI's PyTorch is the one with CUDA. All but
# PyTorch's CPU build are compared with the hashes in requirements.lock, beginning with the pip that takes them from there.
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY requirements.txt requirements.lock ./
# hadolint ignore=SC2086
RUN python -m venv "$VENV" && awk '/^[^ ]/ {on = /^pip==/} on' requirements.lock >/tmp/pip.txt && \
    pip install --require-hashes -r /tmp/pip.txt && \
    if [ "$DEVICE" = cpu ]; then \
      pip install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu $(grep -o '^torch==[^ ]*' requirements.lock); \
    fi && \
    pip install --require-hashes -c requirements.lock -r requirements.txt hatchling

COPY . .
# The command posttrain; the stamp tells the Makefile that its environment is there.
RUN pip install --no-deps --no-build-isolation --no-index -e . && useradd --create-home --uid 1000 posttrain && mkdir runs && chown posttrain runs && touch "$VENV/.installed"
USER 1000
ENV PYTHONUNBUFFERED=1
CMD ["make", "quickstart"]
