# Builds the wheel with its GPU kernels, then tries it where there is neither a compiler nor a CUDA tool.
#
#     docker build --output dist .          # leaves source archive and wheel in dist/
#
# Every RUN is a script that also runs outside of a container; `make package`, which calls them, is part of .ci/run.
# Ubuntu 22.04 for its C library: the wheel runs with that one and later ones.
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04 AS build
WORKDIR /src
COPY .ci/system-packages .ci/
RUN .ci/system-packages
COPY . .
RUN make package

FROM python:3.10-slim-bookworm AS tried
COPY --from=build /src/.ci /.ci
COPY --from=build /src/dist /dist
RUN /.ci/try-wheel /dist/*.whl

FROM scratch
COPY --from=tried /dist /
