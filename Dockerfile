# An image with Octavo and its default model. docs/docker.md says how to use it.
#
#     docker build -t octavo .                              for CPUs
#     docker build -t octavo:cuda --build-arg DEVICE=cuda . for NVIDIA GPUs
#
# The scripts .ci/wheel and .ci/install are also what CI runs to build and to install the package.
ARG DEVICE=cpu
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python -m pip install --quiet -c /source/requirements/base.txt -r /source/requirements/build.txt
RUN /source/.ci/wheel python /dist

# The CPU build of torch has an index of its own.
FROM python:${PYTHON}-slim AS for-cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# Triton compiles the code that launches kernels, so this one needs a C compiler; Python's headers are in the image.
FROM python:${PYTHON}-slim AS for-cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM for-${DEVICE}
COPY --from=build /dist /dist
COPY .ci/install /source/.ci/
COPY requirements/base.txt /source/requirements/
RUN /source/.ci/install python /dist
RUN useradd --create-home octavo && mkdir /models && chown octavo /models
USER octavo
ENV HF_HOME=/models
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["octavo"]
CMD ["serve", "--host", "0.0.0.0"]
