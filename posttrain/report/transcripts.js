unpack("data").then(({ rows, pictures }) => {
  document.getElementById("transcripts").append(viewer(rows, pictures));
  document.body.dataset.ready = "yes";
});
