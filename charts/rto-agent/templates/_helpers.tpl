{{/* The name of every resource. */}}
{{- define "rto-agent.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- .Values.fullnameOverride | default $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "rto-agent.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rto-agent.labels" -}}
{{ include "rto-agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: agent
app.kubernetes.io/part-of: {{ .Chart.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* A value as TOML. Strings, numbers, booleans and lists have the same syntax in JSON and TOML, objects do not. */}}
{{- define "rto-agent.toml" -}}
{{- if kindIs "map" . -}}
{{- $items := list -}}
{{- range $key, $value := . -}}
{{- $items = append $items (printf "%s = %s" $key (include "rto-agent.toml" $value)) -}}
{{- end -}}
{ {{ join ", " $items }} }
{{- else if kindIs "slice" . -}}
[
{{- range . }}
  {{ include "rto-agent.toml" . }},
{{- end }}
]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}

{{/* The keys of [agent] that are only read at the start. A change of one of them restarts the pods. */}}
{{- define "rto-agent.startKeys" -}}
cgroup = "/host/cgroup"
pin_dir = "/host/bpf/rto-agent"
metrics = {{ printf "%s:%v" .Values.metrics.address .Values.metrics.port | toJson }}
{{- range $key, $value := omit .Values.agent "max_entries" }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{- define "rto-agent.config" -}}
[agent]
{{ include "rto-agent.startKeys" . }}
{{- with .Values.agent.max_entries }}
max_entries = {{ toJson . }}
{{- end }}
on_exit = {{ toJson .Values.onExit }}
attach = {{ toJson .Values.attach }}
apply_to_open = {{ toJson .Values.applyToOpen }}
{{- range $name, $settings := .Values.policies }}

[policy.{{ toJson $name }}]
{{- range $key, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "rto-agent.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.config }}

{{ . }}
{{- end }}
{{- end -}}

{{- define "rto-agent.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}{{ end -}}
{{- end -}}

{{/* On which nodes pods run, and who pulls their image. */}}
{{- define "rto-agent.placement" -}}
nodeSelector:
  kubernetes.io/os: linux
  {{- with .Values.nodeSelector }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
