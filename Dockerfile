# The server in one image. Every step is one that `make` runs too: `pip install` builds the page (taking Node from PyPI)
# and `gradiometer serve` applies the migrations.
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
ENV PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/gradiometer
RUN /opt/gradiometer/bin/python -m pip install ".[server]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 gradiometer
COPY --from=build /opt/gradiometer /opt/gradiometer
ENV PATH=/opt/gradiometer/bin:$PATH PYTHONUNBUFFERED=1
USER gradiometer
WORKDIR /home/gradiometer
EXPOSE 7717
# Every route asks for the token, this one too.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:7717/healthz', headers={'Authorization': 'Bearer ' + os.environ.get('GRADIOMETER_TOKEN', '')}), timeout=4)"]
CMD ["gradiometer", "serve", "--host", "0.0.0.0", "--port", "7717"]
